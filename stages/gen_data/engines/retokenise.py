"""From an answer's text back to the ids that were sampled, where that can be done without a doubt."""

from __future__ import annotations

from dataclasses import dataclass

from stages.targets import Target, TemplateRefusalError


@dataclass(frozen=True)
class Retokeniser:
    """A target's tokenizer, used backwards.

    Attributes:
        end_id: the token that ends an answer, None if the target has no such.
    """

    target: Target
    end_id: int | None

    @classmethod
    def of(cls, target: Target) -> Retokeniser:
        """With the end of turn that the target's chat template writes, else its end of sequence."""
        asked = [{"role": "user", "content": "Hi"}]
        told = [*asked, {"role": "assistant", "content": "Hello"}]
        try:
            start = len(target.render(asked))
            written = target.render(told, add_generation_prompt=False)[start:]
        except TemplateRefusalError:
            written = []
        ends = [token for token in written if token in target.eos_ids]
        return cls(target, ends[0] if ends else target.tokenizer.eos_token_id)

    def ids(self, text: str, count: int, *, stopped: bool) -> list[int] | None:
        """The ids of an answer of `count` tokens; if it `stopped` by itself, `end_id` is the last of them.

        The tokenizer's choice for the text is taken if it decodes to the same text and has as many tokens as
        the server counted. Otherwise the target chose other tokens for the same text, or a cut in the middle
        of a character hides some. (A server that does not count the end of an answer cannot be told from a
        target that chose one token less, and so cannot be used.)

        Returns:
            None if they cannot be told.
        """
        ids: list[int] = self.target.tokenizer.encode(text, add_special_tokens=False)
        if self.target.decode(ids) != text or count != len(ids) + stopped:
            return None
        if not stopped:
            return ids
        return None if self.end_id is None else [*ids, self.end_id]
