from __future__ import annotations

from collections.abc import Callable

import pytest

from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.detector import Detector, Unscannable, make_detector
from stages.gen_data.privacy.finding import redact
from stages.gen_data.privacy.rules import Search


@pytest.fixture(scope="session")
def detector() -> Detector:
    return make_detector(Search.of(PrivacyConfig()))


@pytest.fixture(scope="session")
def scrub(detector: Detector) -> Callable[[str], str]:
    """A text with placeholders for what the default search finds."""

    def scrub(text: str) -> str:
        [scan] = detector.scan([text])
        assert not isinstance(scan, Unscannable), scan
        return redact(text, scan)

    return scrub
