"""Small vocabularies that llama.cpp tokenises with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gguf import TokenType

NORMAL, CONTROL, UNKNOWN, BYTE = (
    TokenType.NORMAL,
    TokenType.CONTROL,
    TokenType.UNKNOWN,
    TokenType.BYTE,
)

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """What a model file says about its tokens; the id of a token is its position."""

    texts: tuple[str, ...]  # spelled as in the file: a byte-level text is already mapped
    types: tuple[TokenType, ...]
    bos: int
    eos: int
    eot: int | None = None
    model: str = "gpt2"  # the kind of tokenizer: "gpt2" is byte-level BPE, "llama" SentencePiece
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    add_bos: bool = True
    chat_template: str | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def controls(self) -> tuple[int, ...]:
        """Ids of the tokens that carry no text."""
        return tuple(i for i, kind in enumerate(self.types) if kind == CONTROL)

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids after which generation is over."""
        return (self.eos,) if self.eot is None else (self.eos, self.eot)

    def padded(self, size: int) -> Vocabulary:
        """Grow to ``size`` tokens, the new ones named after their id as converters do."""
        extra = range(len(self), size)
        return replace(
            self,
            texts=self.texts + tuple(f"[PAD{i}]" for i in extra),
            types=self.types + (TokenType.UNUSED,) * len(extra),
            scores=self.scores and self.scores + (-1000.0,) * len(extra),
        )

    def of_type(self, kind: TokenType, tokens: Iterable[int]) -> Vocabulary:
        """Make some tokens of another type."""
        changed = set(tokens)
        types = (kind if i in changed else own for i, own in enumerate(self.types))
        return replace(self, types=tuple(types))

    def reordered(self, order: Sequence[int]) -> Vocabulary:
        """Take the tokens of these ids only, in this order; BOS, EOS and EOT must be among them."""
        return replace(
            self,
            texts=tuple(self.texts[token] for token in order),
            types=tuple(self.types[token] for token in order),
            scores=self.scores and tuple(self.scores[token] for token in order),
            bos=order.index(self.bos),
            eos=order.index(self.eos),
            eot=None if self.eot is None else order.index(self.eot),
        )

    def meaning(self, token: int) -> bytes | str:
        """The bytes that the token adds to a text, or the name of one that adds none."""
        text, kind = self.texts[token], self.types[token]
        if kind == BYTE:
            return bytes.fromhex(text[3:5])
        if kind != NORMAL:
            return text
        if self.model == "llama":
            return text.replace("▁", " ").encode()
        return bytes(_BYTE_CHARACTERS.index(character) for character in text)

    def ids_of_meanings(self) -> dict[bytes | str, int]:
        """The token of each meaning: of several the first that is no byte's."""
        order = sorted(range(len(self)), key=lambda token: (self.types[token] == BYTE, token))
        return {self.meaning(token): token for token in reversed(order)}

    def rows_like(self, other: Vocabulary) -> list[int]:
        """For each token the id that ``other`` has for its meaning, or one that no small vocabulary has.

        Given to a writer as ``rows``, a model is a draft for one of the other vocabulary.
        """
        ids = other.ids_of_meanings()
        return [ids.get(self.meaning(token), 1000 + token) for token in range(len(self))]

    def spelled(self, token: int, text: str) -> Vocabulary:
        """Give one token another text."""
        return replace(self, texts=(*self.texts[:token], text, *self.texts[token + 1 :]))


def _byte_characters() -> tuple[str, ...]:
    """The character that byte-level BPE writes for each byte.

    Printable Latin-1 stands for itself, the rest is numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_CHARACTERS = _byte_characters()


def spell(text: str | bytes) -> str:
    """The spelling of ``text`` in a byte-level vocabulary's file."""
    raw = text.encode() if isinstance(text, str) else text
    return "".join(_BYTE_CHARACTERS[byte] for byte in raw)


def _byte_level(
    controls: tuple[str, ...],
    pieces: Iterable[str | bytes],
    merges: Iterable[tuple[str | bytes, str | bytes]],
    chat_template: str | None = None,
) -> Vocabulary:
    """A byte-level vocabulary; its controls start with BOS, EOS and EOT."""
    texts = (*controls, *map(spell, pieces))
    return Vocabulary(
        texts=texts,
        types=(CONTROL,) * len(controls) + (NORMAL,) * (len(texts) - len(controls)),
        bos=0,
        eos=1,
        eot=2,
        merges=tuple(
            f"{spell(left)} {spell(right)}"
            for left, right in merges
            if spell(left) + spell(right) in texts
        ),
        chat_template=chat_template,
    )


def byte_level(size: int = 24) -> Vocabulary:
    """At most 24 tokens, few enough to enumerate what a model may write.

    Characters are split over tokens: "é" over two, "😀" over two or four. The byte 0xFF is a token
    that no valid text holds. llama.cpp drops a character for which there is no token.
    """
    smile = "😀".encode()
    pieces: list[str | bytes] = ["a", "b", "c", "d", " ", "\n", ".", "ab", " a"]
    pieces += [b"\xc3", b"\xa9", b"\xff", "e"]
    pieces += [smile[:1], smile[1:2], smile[2:3], smile[3:], smile[:2], smile[2:], "f", "cd"]
    merges: list[tuple[str | bytes, str | bytes]] = [("a", "b"), (" ", "a"), ("c", "d")]
    merges += [(smile[:1], smile[1:2]), (smile[2:3], smile[3:])]
    if not 4 <= size <= len(pieces) + 3:
        raise ValueError(f"size must be 4 to {len(pieces) + 3}")
    return _byte_level(("<s>", "</s>", "<|eot_id|>"), pieces[: size - 3], merges)


def all_bytes() -> Vocabulary:
    """Every byte, a few English pieces and ChatML's markers: tokenises any text."""
    merges = [("h", "e"), ("t", "he"), (" ", "the"), ("i", "n"), ("e", "r"), ("o", "n"), (" ", "a")]
    pieces: list[str | bytes] = [bytes([byte]) for byte in range(256)]
    pieces += [left + right for left, right in merges]
    controls = ("<|begin_of_text|>", "<|im_end|>", "<|eot_id|>", "<|im_start|>")
    return _byte_level(controls, pieces, merges, chat_template=CHATML)


def sentence_piece(*, byte_fallback: bool = True) -> Vocabulary:
    """A small SentencePiece vocabulary, whose pieces start with "▁" for a space.

    Without ``byte_fallback`` llama.cpp ends the process on a character that has no token.
    """
    pieces = ["▁", "a", "b", "c", "d", "e", "é", "▁a", "ab", "▁ab", "cd", "."]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    texts = ("<unk>", "<s>", "</s>", *fallback, *pieces)
    return Vocabulary(
        texts=texts,
        types=(UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(fallback), *[NORMAL] * len(pieces)),
        bos=1,
        eos=2,
        model="llama",
        # The tokenizer merges the neighbours whose joint piece scores best: longer ones here.
        scores=tuple(float(len(text)) if text in pieces else 0.0 for text in texts),
    )
