"""`--config run.yaml`: flags from a file, under their names; or from the manifest of an artifact."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args, get_origin

from stages.errors import EagleError

if TYPE_CHECKING:
    from pydantic import BaseModel

_OF_MANIFEST = {"kind", "config", "schema_version"}


def read_run_file(uri: str, stage: str, config_class: type[BaseModel]) -> dict[str, str | list[str]]:
    """The flags in a YAML or JSON file, as texts that are read as those of the command line are.

    Args:
        uri: of a local or a remote file.
        stage: the name of the one that it is for.
        config_class: its fields are the flags, written with `-` or `_`. A manifest has other settings too,
            such as digests; those are left out.

    Raises:
        EagleError: it cannot be read, a key is no flag, a value is none that a flag takes, or the manifest is
            of what another stage makes.
    """
    import yaml

    from stages.artifacts.manifest import STAGE_OF_KIND
    from stages.artifacts.uri import filesystem, storage_errors

    fs, path = filesystem(uri)
    with storage_errors(uri):
        data = bytes(fs.cat_file(path))
    try:
        content = yaml.safe_load(data.decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EagleError(f"is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise EagleError("has no flags in it: write one a line, such as max-prompts: 100")
    fields = config_class.model_fields
    named = {str(key).removeprefix("--").replace("-", "_"): value for key, value in content.items()}
    if named.keys() >= _OF_MANIFEST and isinstance(settings := named["config"], Mapping):
        makers = {str(each): maker for each, maker in STAGE_OF_KIND.items()}
        if (maker := makers.get(kind := str(named["kind"]))) != stage:
            raise EagleError(f"is of a {kind} artifact, whose settings are those of eagle {maker}")
        named = {key: value for key, value in settings.items() if key in fields}
    for key in named.keys() - fields.keys():
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f". Did you mean {near[0].replace('_', '-')}?" if near else ""
        raise EagleError(f"there is no flag {key.replace('_', '-')}{hint}")
    return {
        key: _several(key, value) if _takes_several(fields[key].annotation) else _text(key, value)
        for key, value in named.items()
        if value is not None
    }


def _takes_several(annotation: Any) -> bool:
    return any(get_origin(each) in (list, tuple) for each in (annotation, *get_args(annotation)))


def _several(key: str, value: Any) -> list[str]:
    return [_text(key, each) for each in (value if isinstance(value, list) else [value])]


def _text(key: str, value: Any) -> str:
    if isinstance(value, Mapping | list):
        raise EagleError(f"{key.replace('_', '-')} takes one value")
    return str(value).lower() if isinstance(value, bool) else str(value)
