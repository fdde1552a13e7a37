"""eagle serve: load target and head, warm up, answer requests until told to stop."""

from __future__ import annotations

import ipaddress
import os
import time
from contextlib import closing
from dataclasses import replace

from pydantic import BaseModel

from stages.decoding import EagleModel, SamplingParams
from stages.progress import Reporter
from stages.serve.app import Access, create_app
from stages.serve.backend import API_KEY, backend_command
from stages.serve.config import ServeConfig
from stages.serve.engine_thread import EngineThread
from stages.serve.kv_memory import reserve_kv
from stages.serve.served_model import ServedModel
from stages.serve.server import GRACE_S, Server, bind, url

WARM_UP_TOKENS = 4
MAX_BATCH = 8
MAX_QUEUE = 64


class ServeResult(BaseModel):
    """What a server did between its start and its stop."""

    model: str
    url: str
    requests: int
    uptime_s: float

    def summary(self) -> str:
        """One line for people."""
        return f"served {self.requests} requests of {self.model} in {self.uptime_s:.0f} s"


class OtherEngine(BaseModel):
    """How another engine is started."""

    command: str

    def summary(self) -> str:
        """The command, to be typed."""
        return self.command


def run(config: ServeConfig, report: Reporter) -> ServeResult | OtherEngine:
    """Serves until SIGINT or SIGTERM, then returns; or becomes another engine, or says how.

    Raises:
        EagleError: the address is taken, target or head cannot be loaded or do not fit each other, or the
            target has no chat template or less context than asked for.
    """
    if config.backend != "eagle":
        command = backend_command(config, api_keys(config), installed=not config.print_command)
        if not config.print_command:
            report.log(f"starting {command.shown()}")
            command.replace_process()
        return OtherEngine(command=command.shown())
    access = Access(
        api_keys=api_keys(config),
        rate_limit=config.rate_limit,
        max_body=config.max_body,
        cors_origins=config.cors_origin,
    )
    with closing(bind(config.host, config.port)) as listener:
        report.log(
            f"loading {config.target}" + (f" with {config.head}" if config.head else ", without a draft head")
        )
        model = EagleModel.from_pretrained(
            config.target,
            config.head,
            device=config.device,
            dtype=config.dtype,
            tree=config.tree,
            chat_template=config.chat_template,
            verify=config.verify,
            max_batch=config.max_batch or MAX_BATCH,
            prefix_reuse=config.prefix_reuse,
            overlap=None if config.overlap else False,
        )
        model.target.release_packed()
        served = ServedModel.of(model.target, config.served_model_name, config.max_model_len)
        if config.kv_memory is not None:
            wanted, cut = served.max_length, config.max_model_len is None
            length = reserve_kv(model.engine, config.kv_memory, wanted, cut=cut)
            if length < wanted:
                report.log(f"--kv-memory has room for {length} of {wanted} tokens of context a request")
                served = replace(served, max_length=length)
        if ignored := served.unsupported_defaults():
            report.log(f"not supported, so left out: {', '.join(ignored)} of the target's generation config")
        prompt_ids = model.target.render([{"role": "user", "content": "Hello"}])
        for _ in model.stream(prompt_ids, SamplingParams(max_new_tokens=WARM_UP_TOKENS)):
            pass

        engine = EngineThread(model.engine, config.max_queue or MAX_QUEUE)
        grace_s = GRACE_S if config.shutdown_timeout is None else config.shutdown_timeout
        server = Server(
            create_app(served, engine, report.log, access=access, log_format=config.log_format),
            listener,
            engine,
            ready=lambda: report.log(_greeting(served.name, url(listener))),
            stopping=lambda: report.log(_farewell(engine.running, grace_s)),
            grace_s=grace_s,
            proxies=config.forwarded_allow_ips,
        )
        if not access.api_keys and not is_loopback(listener.getsockname()[0]):
            report.log(f"anyone who reaches {config.host} may ask; set {API_KEY} to keep strangers out")
        base_url, start = url(listener), time.monotonic()
        engine.start()
        server.run()
    return ServeResult(
        model=served.name, url=base_url, requests=engine.requests, uptime_s=round(time.monotonic() - start, 3)
    )


def api_keys(config: ServeConfig) -> tuple[str, ...]:
    """The keys of the flags, else those of the environment, without what is empty."""
    given = config.api_key or os.environ.get(API_KEY, "").split(",")
    return tuple(dict.fromkeys(key.strip() for key in given if key.strip()))


def is_loopback(address: str) -> bool:
    """Whether an address of a socket is reached from this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _greeting(name: str, base_url: str) -> str:
    return f"serving {name} at {base_url}/v1, with a page to chat at {base_url} (Ctrl-C stops)"


def _farewell(running: int, grace_s: float) -> str:
    if not running or not grace_s:
        return "stopping"
    those = "the running answer has" if running == 1 else f"{running} running answers have"
    return f"stopping; {those} {grace_s:.0f} s to finish, a second Ctrl-C ends it now"
