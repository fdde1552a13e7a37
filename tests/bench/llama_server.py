"""llama.cpp's own server as a program with the flags of `llama-server`: the package xllamacpp has the server
alone.

    python llama_server.py --model FILE --ctx-size N --parallel N --alias NAME --host HOST --port PORT
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in (("model", str), ("alias", str), ("host", str), ("port", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("ctx-size", "parallel"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-cache-prompt", action="store_true")
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.hostnames, params.port = [given.host], given.port
    params.n_ctx, params.n_parallel = given.ctx_size, given.parallel
    params.cpuparams.n_threads = given.threads
    params.cache_prompt = not given.no_cache_prompt
    server = xllamacpp.Server(params)  # stops when it is forgotten
    assert server.listening_address
    signal.pause()


if __name__ == "__main__":
    main()
