"""eagle serve: load target and head, warm up, answer requests until told to stop."""

from __future__ import annotations

import ipaddress
import os
import time
from contextlib import closing

from pydantic import BaseModel

from stages.decoding import EagleModel, SamplingParams
from stages.progress import Reporter
from stages.serve.app import Access, create_app
from stages.serve.config import ServeConfig
from stages.serve.engine_thread import EngineThread
from stages.serve.served_model import ServedModel
from stages.serve.server import GRACE_S, Server, bind, url

WARM_UP_TOKENS = 4
API_KEY = "EAGLE_API_KEY"


class ServeResult(BaseModel):
    """What a server did between its start and its stop."""

    model: str
    url: str
    requests: int
    uptime_s: float

    def summary(self) -> str:
        """One line for people."""
        return f"served {self.requests} requests of {self.model} in {self.uptime_s:.0f} s"


def run(config: ServeConfig, report: Reporter) -> ServeResult:
    """Serves until SIGINT or SIGTERM, then returns.

    Raises:
        EagleError: the address is taken, target or head cannot be loaded or do not fit each other, or the
            target has no chat template or less context than asked for.
    """
    access = Access(
        api_key=config.api_key or os.environ.get(API_KEY) or None,
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
            max_batch=config.max_batch,
        )
        served = ServedModel.of(model.target, config.served_model_name, config.max_model_len)
        if ignored := served.unsupported_defaults():
            report.log(f"not supported, so left out: {', '.join(ignored)} of the target's generation config")
        prompt_ids = model.target.render([{"role": "user", "content": "Hello"}])
        for _ in model.stream(prompt_ids, SamplingParams(max_new_tokens=WARM_UP_TOKENS)):
            pass

        engine = EngineThread(model.engine, config.max_queue)
        server = Server(
            create_app(served, engine, report.log, access=access, log_format=config.log_format),
            listener,
            engine,
            ready=lambda: report.log(f"serving {served.name} at {url(listener)}/v1 (Ctrl-C stops)"),
            stopping=lambda: report.log(_farewell(engine)),
        )
        if access.api_key is None and not is_loopback(listener.getsockname()[0]):
            report.log(f"anyone who reaches {config.host} may ask; set {API_KEY} to keep strangers out")
        base_url, start = url(listener), time.monotonic()
        engine.start()
        server.run()
    return ServeResult(
        model=served.name, url=base_url, requests=engine.requests, uptime_s=round(time.monotonic() - start, 3)
    )


def is_loopback(address: str) -> bool:
    """Whether an address of a socket is reached from this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _farewell(engine: EngineThread) -> str:
    if not engine.running:
        return "stopping"
    running = "the running request has" if engine.running == 1 else f"{engine.running} running requests have"
    return f"stopping; {running} {GRACE_S:.0f} s to finish, a second Ctrl-C ends it now"
