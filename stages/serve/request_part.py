"""What the parts of a request's body share: strict types, text that is text, and nothing that is ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from stages.serve.api_error import ApiError, shown


class RequestPart(BaseModel):
    """A part of a request: types as they are, no NaN, unknown fields kept so that they can be refused."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="allow")

    def refuse_extra(self, prefix: str) -> None:
        """Refuses fields that are not known, unless they are empty.

        Args:
            prefix: the path of this part in the body, such as `messages[0].`.

        Raises:
            ApiError: there is such a field.
        """
        for name, value in (self.model_extra or {}).items():
            refuse(prefix + name, value, ([], {}, False), hint="leave it out")


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode, a surrogate stands alone") from None
    return text


Encodable = AfterValidator(_encodable)
"""Goes behind what else is asked of a text, else the description of the API would lose that."""
UnicodeText = Annotated[str, Encodable]


def all_encodable(value: dict[str, Any]) -> dict[str, Any]:
    """The value, which JSON made. Raises ValueError for a key or text in it that is no text."""
    left: list[Any] = [value]
    while left:  # not by recursion: JSON may be as deep as the stack
        each = left.pop()
        if isinstance(each, str):
            _encodable(each)
        elif isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list):
            left += each
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(all_encodable)]
"""An object of any content, whose keys and texts are text."""


def _whole(value: Any) -> Any:
    """JSON knows one kind of number: 60.0 is 60, and some languages write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
"""Goes behind the bounds of a number, else the description of the API would lose them."""


def refuse(param: str, value: Any, neutral: tuple[Any, ...] | None, hint: str | None = None) -> None:
    """Refuses a field that is not supported, unless its value asks for nothing special.

    Args:
        neutral: the values that ask for nothing; None for a field that no API has.

    Raises:
        ApiError: it asks for something.
    """
    if neutral is None:
        raise ApiError(400, f"{param} is no parameter; leave it out", param=param, code="unknown_parameter")
    if value is None or any(_same(value, one) for one in neutral):
        return
    allowed = " or ".join(shown(one) for one in neutral)
    hint = hint or (f"leave it out or use {allowed}" if allowed else "leave it out")
    message = f"{param} = {shown(value)} is not supported; {hint}"
    raise ApiError(400, message, param=param, code="unsupported_parameter")


def invalid(param: str, message: str) -> ApiError:
    """The error for a value that cannot be."""
    return ApiError(400, message, param=param, code="invalid_value")


def _same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1 and false from 0, as JSON does."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
