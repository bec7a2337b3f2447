"""Tokens to text and back, whether two vocabularies are one, and what they share if they are not."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pyspec.errors import VocabularyMismatchError
from pyspec.llama import Model

# llama.cpp's own limits for a draft (common/speculative.cpp): this many ids more or less are padding
# whatever the file calls them, and the first ids may differ, as models name the same specials differently.
_SIZE_DIFFERENCE = 128
_FIRST_COMPARED = 5

# A draft that has fewer of the target's tokens than this share of the smaller vocabulary could seldom propose
# the right one.
_LEAST_SHARED = 0.1
# A character of Unicode's private use, which tokenizers do not join with its neighbours.
_ANCHOR = "\ue000"

# Of the type that numpy indexes with: another one is converted each time.
Ids = npt.NDArray[np.intp]

log = logging.getLogger("pyspec.vocab")


def shared_tokens(target: Model, draft: Model) -> SharedTokens | None:
    """What a draft of another vocabulary shares with the target; None if the vocabulary is the same.

    Raises:
        VocabularyMismatchError: They share next to nothing.
    """
    reason = difference(target, draft)
    if reason is None:
        return None
    shared = SharedTokens(target, draft)
    log.debug(
        "%s drafts for %s through the %d tokens that both have: %s",
        *(draft.name, target.name, len(shared), reason),
    )
    return shared


def check_same_vocabulary(target: Model, draft: Model) -> None:
    """Refuse a draft of another vocabulary.

    Raises:
        VocabularyMismatchError: It names the first difference.
    """
    reason = difference(target, draft)
    if reason is not None:
        raise VocabularyMismatchError(
            f"{draft.name} has another vocabulary than {target.name}: {reason}"
        )


def difference(target: Model, draft: Model) -> str | None:
    """Why a draft's token ids do not mean what the target's mean, as llama.cpp judges it; None if they do.

    Sizes may differ by padding: ids that the file marks unused, or no more ids than llama.cpp allows.

    Returns:
        Both kinds or sizes, or the first id that differs with both texts.
    """
    if target.vocab_type != draft.vocab_type:
        return (
            f"their tokenizers are of different kinds ({target.vocab_type} and {draft.vocab_type} in "
            "llama.cpp's numbering)"
        )
    for special, adds, ids in (
        ("BOS", (target.adds_bos, draft.adds_bos), (target.bos, draft.bos)),
        ("EOS", (target.adds_eos, draft.adds_eos), (target.eos, draft.eos)),
    ):
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            return (
                f"the target {'adds' if adds[0] else 'does not add'} {special} (id {ids[0]}), "
                f"the draft {'adds' if adds[1] else 'does not add'} it (id {ids[1]})"
            )
    common = min(target.n_vocab, draft.n_vocab)
    larger = max(target, draft, key=lambda model: model.n_vocab)
    if larger.n_vocab - common > _SIZE_DIFFERENCE and not all(
        larger.is_unused(token) for token in range(common, larger.n_vocab)
    ):
        return f"its vocabulary has {draft.n_vocab} tokens, the target's {target.n_vocab}"
    for token in range(_FIRST_COMPARED, common):
        texts = target.token_text(token), draft.token_text(token)
        if texts[0] != texts[1]:
            shown = [text.decode("utf-8", "replace") for text in texts]
            return f"token {token} is {shown[0]!r} in the target and {shown[1]!r} in the draft"
    return None


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


class SharedTokens:
    """Which tokens of a draft are which of a target's: each has at most one twin in the other vocabulary.

    Tokens of text are twins if they add the same bytes to a text, however their files spell these. Of several
    with the same bytes the first counts, or the first that is more than the token of a byte. Control tokens
    are never twins of text, but of what means the same: of equal name, or both the end of a turn.

    Args:
        target: The model whose text is wanted.
        draft: The model that proposes.

    Attributes:
        target_ids: [n] ids of the target that have a twin, rising.
        draft_ids: [n] their twins.
        to_draft: [n_vocab of the target] each id's twin, or -1.
        speller: Spells texts in the draft's tokens.

    Raises:
        VocabularyMismatchError: They share next to nothing.
    """

    def __init__(self, target: Model, draft: Model) -> None:
        self.speller = Speller(draft)
        ids, twins = _ids_of_texts(target), self.speller.ids
        pairs = [(ids[text], twins[text]) for text in ids.keys() & twins.keys()]
        if len(pairs) < _LEAST_SHARED * min(len(ids), len(twins)):
            raise VocabularyMismatchError(
                f"{draft.name} cannot draft for {target.name}: only {len(pairs)} of its {len(twins)} tokens "
                f"of text are also among the target's {len(ids)}: use another draft, or none (--no-draft)"
            )
        pairs += _pairs_of_controls(target, draft)
        pairs.sort()
        both = np.array(pairs, np.intp).reshape(-1, 2)
        self.target_ids: Ids = np.ascontiguousarray(both[:, 0])
        self.draft_ids: Ids = np.ascontiguousarray(both[:, 1])
        self.to_draft: Ids = np.full(target.n_vocab, -1, np.intp)
        self.to_draft[self.target_ids] = self.draft_ids

    def __len__(self) -> int:
        return len(self.target_ids)


def _ids_of_texts(model: Model) -> dict[bytes, int]:
    """The id of each text that a token adds."""
    pieces, n = model.pieces, model.n_vocab
    # Of equal keys the last counts, which here is the first id.
    ids = dict(zip(reversed(pieces), range(n - 1, -1, -1), strict=True))
    ids.pop(b"", None)
    # A tokenizer writes the token of a byte only where no other fits.
    for token in [token for token, text in enumerate(pieces) if len(text) == 1]:
        if model.is_byte(ids[pieces[token]]):
            ids[pieces[token]] = token
    return ids


def _pairs_of_controls(target: Model, draft: Model) -> list[tuple[int, int]]:
    names, drafts_names = _ids_of_names(target), _ids_of_names(draft)
    same_name = [(names[name], drafts_names[name]) for name in names if name in drafts_names]
    ends = {target.end_of_turn, target.eos}
    drafts_ends = {draft.end_of_turn, draft.eos}
    candidates = [
        # Vocabularies hold marks that their models never write, and whose name is another's real end.
        *((token, twin) for token, twin in same_name if token in ends or twin not in drafts_ends),
        (target.end_of_turn, draft.end_of_turn),
        (target.eos, draft.eos),
        *same_name,
    ]
    pairs: dict[int, int] = {}
    for token, twin in candidates:
        if min(token, twin) >= 0 and token not in pairs and twin not in pairs.values():
            pairs[token] = twin
    return list(pairs.items())


def _ids_of_names(model: Model) -> dict[bytes, int]:
    """The id of each control token by its name, such as <|im_end|>."""
    controls = (
        token for token, text in enumerate(model.pieces) if not text and model.is_control(token)
    )
    ids: dict[bytes, int] = {}
    for token in controls:
        ids.setdefault(model.piece(token, special=True), token)
    return ids


class Speller:
    """Spells parts of a text in a model's tokens.

    Unlike the tokenizer it takes any bytes: those that are no characters, or not yet, are spelled with what
    tokens the vocabulary has for them.

    Args:
        model: Whose tokens to use.

    Attributes:
        ids: The token of each text that one adds.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.ids = _ids_of_texts(model)
        self._longest = max(map(len, self.ids), default=0)

    def spell(self, text: bytes, *, begins: bool) -> tuple[list[int], list[int]]:
        """Tokens of a text.

        Args:
            text: What to spell.
            begins: Whether it is the beginning of a text, before which some tokenizers put a space. If not,
                it should begin where a word does, so that the tokens are those of the text as a whole.

        Returns:
            Ids, and where in `text` each ends. Bytes without a token are counted to the one after them.
        """
        ids, ends = list[int](), list[int]()
        for start, end, is_text in _runs(text):
            part = text[start:end]
            is_first = begins and start == 0
            found = self._tokenize(part.decode(), begins=is_first) if is_text else None
            if found is None:
                found = self._longest_tokens(part)
            ids += found[0]
            ends += [start + place for place in found[1]]
        return ids, ends

    def _tokenize(self, text: str, *, begins: bool) -> tuple[list[int], list[int]] | None:
        """What the tokenizer makes of a text; None if that spells another text."""
        model, before = self._model, b""
        if model.adds_space:
            # A text goes on after something: a character that is taken off again.
            text = text if begins else _ANCHOR + text
            before = b" " if begins else b" " + _ANCHOR.encode()
        ids = model.tokenize(text, add_special=False, parse_special=False)
        pieces = [model.pieces[token] for token in ids]
        if b"".join(pieces) != (b" " if model.adds_space else b"") + text.encode():
            return None
        ends = (np.cumsum([len(piece) for piece in pieces]) - len(before)).tolist()
        if begins:
            return ids, [max(0, end) for end in ends]
        if before and 0 not in ends:
            return None
        n = ends.index(0) + 1 if before else 0
        return ids[n:], ends[n:]

    def _longest_tokens(self, text: bytes) -> tuple[list[int], list[int]]:
        """Of the tokens that fit at each place the longest."""
        ids, ends, at = list[int](), list[int](), 0
        while at < len(text):
            fitting = range(min(self._longest, len(text) - at), 0, -1)
            length = next((n for n in fitting if text[at : at + n] in self.ids), 0)
            if length:
                ids.append(self.ids[text[at : at + length]])
                ends.append(at + length)
            at += max(1, length)
        return ids, ends


def _runs(text: bytes) -> Iterator[tuple[int, int, bool]]:
    """The parts of text, as start, end and whether it is characters rather than stray bytes."""
    start = 0
    while start < len(text):
        try:
            text[start:].decode()
        except UnicodeDecodeError as error:
            stray, end = start + error.start, start + error.end
        else:
            stray = end = len(text)
        if start < stray:
            yield start, stray, True
        if stray < end:
            yield stray, end, False
        start = end
