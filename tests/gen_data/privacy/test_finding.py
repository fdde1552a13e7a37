from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.gen_data.privacy.finding import SECRET, Finding, mask, redact, resolve

findings = st.builds(
    lambda start, length, entity, score: Finding(start, start + length, entity, score),
    st.integers(0, 30),
    st.integers(1, 10),
    st.sampled_from(["A", "B", SECRET]),
    st.sampled_from([0.5, 0.6, 1.0]),
)


@given(st.lists(findings, max_size=8))
def test_resolved_findings_cover_the_same_characters_without_overlap(found):
    resolved = resolve(found)
    covered = [i for finding in resolved for i in range(finding.start, finding.end)]
    assert covered == sorted({i for finding in found for i in range(finding.start, finding.end)})
    assert resolve(reversed(found)) == resolved


@given(st.lists(findings, max_size=8))
def test_no_overlap_hides_a_secret(found):
    secret = {i for f in found if f.entity == SECRET for i in range(f.start, f.end)}
    shown = {i for f in resolve(found) if f.entity == SECRET for i in range(f.start, f.end)}
    assert secret <= shown


def test_overlapping_findings_become_one_named_after_the_surest():
    found = [
        Finding(0, 6, "PHONE_NUMBER", 0.6),
        Finding(4, 12, "CREDIT_CARD", 1.0),
        Finding(12, 14, "US_SSN", 0.5),
    ]
    assert resolve(found) == [Finding(0, 12, "CREDIT_CARD", 1.0), Finding(12, 14, "US_SSN", 0.5)]
    assert redact("0123456789ab12!", resolve(found)) == "<CREDIT_CARD><US_SSN>!"


@given(st.text())
def test_a_mask_shows_the_shape_and_nothing_else(text):
    masked = mask(text)
    assert len(masked) == len(text)
    assert all(m in "aA0." or (m == c and not c.isalnum()) for m, c in zip(masked, text, strict=True))
