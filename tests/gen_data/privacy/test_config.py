from __future__ import annotations

import pytest
from pydantic import ValidationError

from stages.gen_data.privacy.config import DEFAULT_ENTITIES, PrivacyConfig


def test_entities_may_be_given_with_commas_in_any_case_and_default_stands_for_many():
    given = PrivacyConfig(pii_entities=["default,person", "URL", "EMAIL_ADDRESS"]).pii_entities
    assert given == [*DEFAULT_ENTITIES, "PERSON", "URL"]
    assert PrivacyConfig(pii_entities=["URL"]).pii_entities == ["URL"]


@pytest.mark.parametrize(
    "change",
    [
        {"pii": "hide"},
        {"pii_entities": []},
        {"pii_entities": [","]},
        {"pii_entities": ["E-MAIL"]},
        {"pii_threshold": 0},
        {"pii_threshold": 1.1},
        {"pii_language": "english"},
        {"pii_engine": "x"},
    ],
)
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValidationError):
        PrivacyConfig(**change)
