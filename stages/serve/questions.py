"""From a request to the answers that it asks for: prompt ids, how to decode, what to make of the text."""

from __future__ import annotations

from stages.serve.answer import Answer
from stages.serve.api_error import ApiError
from stages.serve.completion import Question
from stages.serve.grammar import GrammarMask, Grammars
from stages.serve.prompt_ids import chat_ids, text_ids
from stages.serve.request import ChatRequest, CompletionRequest
from stages.serve.served_model import ServedModel
from stages.serve.tool_calls import ToolCallReader
from stages.serve.tool_form import ToolForm


def questions_of(
    model: ServedModel, grammars: Grammars, body: ChatRequest | CompletionRequest, most: int
) -> list[Question]:
    """The answers that a request asks for, `n` to each prompt in turn.

    Raises:
        ApiError: there are more than `most`, a prompt is empty or does not fit, or an option does not go with
            this model.
    """
    _refuse_many(body, most)
    if isinstance(body, ChatRequest):
        param, form = "messages", _form(model, body)
        prompts = [chat_ids(model, body, body.shown_tools)]
    else:
        param, form = "prompt", None
        special = body.add_special_tokens is not False
        prompts = [text_ids(model, prompt, special=special) for prompt in body.prompts]
    seed, rules = model.seed(body), model.token_rules(body)
    questions: list[Question] = []
    for prompt_ids in [_cut(model, body, ids) for ids in prompts]:
        for sample in range(body.choices):
            params = model.sampling(
                body,
                len(prompt_ids),
                param=param,
                seed=seed,
                sample=sample,
                token_mask=_mask(grammars, body, form) or rules,
            )
            text = Answer(
                model.target.tokenizer,
                end_ids=params.end_ids(model.target.eos_ids),
                max_tokens=params.max_new_tokens,
                stops=body.stops,
                min_tokens=body.min_tokens or 0,
                eos_ids=model.target.eos_ids,
                reader=_reader(body, form),
                with_stop=bool(body.include_stop_str_in_output),
                with_special=body.skip_special_tokens is False,
                markers={} if form is None else model.special_tokens(form.markers),
            )
            questions.append(Question(prompt_ids, params, text, drafts=body.speculative is not False))
    return questions


def compile_grammar(model: ServedModel, grammars: Grammars, body: ChatRequest | CompletionRequest) -> None:
    """Has the grammar of a request at hand: a hard one takes seconds.

    Raises:
        ApiError: it cannot be followed, or this model does not make calls by itself.
    """
    _mask(grammars, body, _form(model, body) if isinstance(body, ChatRequest) else None)


def _refuse_many(body: ChatRequest | CompletionRequest, most: int) -> None:
    """Raises ApiError for more answers than may wait: it could never be their turn."""
    wanted = body.choices * (len(body.prompts) if isinstance(body, CompletionRequest) else 1)
    if wanted > most:
        message = (
            f"the request asks for {wanted} answers (prompts times n) and this server takes {most} at a "
            "time; send several requests"
        )
        raise ApiError(400, message, param="n", code="invalid_value")


def _cut(model: ServedModel, body: ChatRequest | CompletionRequest, prompt_ids: list[int]) -> list[int]:
    """As much of a prompt as is to be read: its end, unless its start is asked for."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt_ids
    if most < 0:
        most = max(1, model.max_length - (body.token_limit or 1))
    return prompt_ids[:most] if body.truncation_side == "right" else prompt_ids[-most:]


def _form(model: ServedModel, request: ChatRequest) -> ToolForm | None:
    """The form of the calls that a request may get; None where there are none.

    Raises:
        ApiError: this model does not make calls by itself.
    """
    if not request.shown_tools:
        return None
    form = model.tool_form
    if form.free or request.must_call:
        return form
    lack = "form of calls is not known here" if form.described else "chat template knows no tools"
    message = (
        f"the {lack}, so this model cannot choose to call one; use tool_choice required, a function, or none"
    )
    raise ApiError(400, message, param="tools", code="unsupported_parameter")


def _mask(
    grammars: Grammars, body: ChatRequest | CompletionRequest, form: ToolForm | None
) -> GrammarMask | None:
    if form is not None and isinstance(body, ChatRequest):
        tools = body.callable_tools
        if body.follows_schemas:
            return grammars.calls(form, tools, must=body.must_call, one=body.one_call)
    return None if body.structure is None else grammars.of(body.structure)


def _reader(body: ChatRequest | CompletionRequest, form: ToolForm | None) -> ToolCallReader | None:
    if form is None or not isinstance(body, ChatRequest):
        return None
    names = [tool.function.name for tool in body.callable_tools]
    return ToolCallReader(form, names, one=body.one_call, only=body.must_call)
