"""Tokens to text, as they come, and whether two vocabularies are one."""

from __future__ import annotations

import codecs

from pyspec.errors import VocabularyMismatchError
from pyspec.llama import Model

# llama.cpp's own limits for a draft (common/speculative.cpp): this many ids more or less are padding
# whatever the file calls them, and the first ids may differ, as models name the same specials differently.
_SIZE_DIFFERENCE = 128
_FIRST_COMPARED = 5


def check_same_vocabulary(target: Model, draft: Model) -> None:
    """Refuse a draft whose token ids do not mean what the target's mean, as llama.cpp judges it.

    Sizes may differ by padding: ids that the file marks unused, or no more ids than llama.cpp allows.

    Raises:
        VocabularyMismatchError: It names both sizes, or the first id that differs with both texts.
    """
    names = f"{draft.name} cannot draft for {target.name}"
    if target.vocab_type != draft.vocab_type:
        raise VocabularyMismatchError(
            f"{names}: their tokenizers are of different kinds "
            f"({draft.vocab_type} and {target.vocab_type} in llama.cpp's numbering)"
        )
    for special, adds, ids in (
        ("BOS", (target.adds_bos, draft.adds_bos), (target.bos, draft.bos)),
        ("EOS", (target.adds_eos, draft.adds_eos), (target.eos, draft.eos)),
    ):
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            raise VocabularyMismatchError(
                f"{names}: the target {'adds' if adds[0] else 'does not add'} {special} (id {ids[0]}), "
                f"the draft {'adds' if adds[1] else 'does not add'} it (id {ids[1]})"
            )
    common = min(target.n_vocab, draft.n_vocab)
    larger = max(target, draft, key=lambda model: model.n_vocab)
    if larger.n_vocab - common > _SIZE_DIFFERENCE and not all(
        larger.is_unused(token) for token in range(common, larger.n_vocab)
    ):
        raise VocabularyMismatchError(
            f"{names}: its vocabulary has {draft.n_vocab} tokens, the target's {target.n_vocab}"
        )
    for token in range(_FIRST_COMPARED, common):
        texts = target.token_text(token), draft.token_text(token)
        if texts[0] != texts[1]:
            shown = [text.decode("utf-8", "replace") for text in texts]
            raise VocabularyMismatchError(
                f"{names}: token {token} is {shown[0]!r} in the target and {shown[1]!r} in the draft"
            )


class TokenDecoder:
    """Turns tokens into text one at a time.

    A character whose bytes are spread over several tokens is held back until the last of them; bytes that
    are not UTF-8 become U+FFFD.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def text(self, token: int) -> str:
        """What the token completes; empty while a character is incomplete."""
        return self._decoder.decode(self._model.piece(token))

    @property
    def incomplete(self) -> bool:
        """Whether a character has begun whose bytes have not all come."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The replacement for an incomplete character at the end of the text, or nothing."""
        return self._decoder.decode(b"", final=True)
