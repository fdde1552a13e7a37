from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stages.errors import EagleError
from stages.targets import Target, load_target
from stages.targets.chat_template import template_variables
from tests.tiny import make_tiny_target

TEMPLATE = """
{%- if not date_string is defined %}{% set date_string = "today" %}{% endif %}{{ bos_token }}
{%- set found = namespace(any=false) %}
{%- for message in messages %}{% generation %}{{ message.content }}{{ date_string }}{% endgeneration %}
{%- if loop.last %}{% break %}{% endif %}{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ raise_exception("no") }}{% endif %}
{%- for i in range(2) %}{{ tools | length }}{{ strftime_now("%Y") }}{% endfor %}
{%- if add_generation_prompt %}{{ "a" }}{% endif %}"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = make_tiny_target(tmp_path_factory.mktemp("template") / "target", layers=1)
    return load_target(str(folder), device="cpu", dtype="float32")


def with_template(target: Target, template: Any) -> Target:
    class Tokenizer:
        chat_template = template
        special_tokens_map = {**target.tokenizer.special_tokens_map, "bos_token": "<s>"}  # noqa: RUF012

    return dataclasses.replace(target, tokenizer=Tokenizer())


def test_variables_are_what_the_template_asks_for_and_is_not_given(target: Target) -> None:
    assert template_variables(with_template(target, TEMPLATE)) == {"date_string", "enable_thinking"}
    both = {"default": TEMPLATE, "tool_use": "{{ messages }}{{ style }}"}
    assert template_variables(with_template(target, both)) == {"date_string", "enable_thinking", "style"}
    assert template_variables(target) == set()
    assert template_variables(with_template(target, None)) == set()
    with pytest.raises(EagleError, match="is no Jinja template"):
        template_variables(with_template(target, "{% if %}"))
