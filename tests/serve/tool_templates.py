"""Chat templates that write the calls of tools in the forms of the common families."""

from __future__ import annotations

_SHOWN = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _template(calls: str) -> str:
    return (
        _SHOWN
        + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        + "{% if message.tool_calls %}"
        + calls
        + "{% endif %}<|im_end|>\n{% endfor %}"
        + _START
    )


_CALL = "{% for call in message.tool_calls %}{% set f = call.function %}"
_NAME_FIRST = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
TAGGED = _template(_CALL + "\n<tool_call>\n" + _NAME_FIRST + "\n</tool_call>{% endfor %}")
TAGGED_NAME_LAST = _template(
    _CALL + '\n<tool_call>\n{ "arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}'
    "\n</tool_call>{% endfor %}"
)
LISTED = _template(
    "{% for call in message.tool_calls if call.id | length != 9 %}{{ raise_exception('bad id') }}{% endfor %}"
    "[TOOL_CALLS] [" + _CALL + _NAME_FIRST + "{{ '' if loop.last else ', ' }}{% endfor %}]"
)
NAMED = _template(_CALL + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}")
BARE = _template(_CALL + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}')
XML = _template(_CALL + "<tool_call><function={{ f.name }}></function></tool_call>{% endfor %}")
