"""What a service allows, decided when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.sampling import Rule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and names of a service.

    Attributes:
        model: What the model is called in requests.
        rule: How drafted tokens are verified unless a request says otherwise.
        api_keys: A request needs one of them; none means that no key is asked for.
        hosts: Names that a request may have in its Host header, in lower case; None allows all.
        origins: Web pages of these origins may use the service (CORS).
        max_body: Bytes of a request.
        max_prompt: Tokens of a prompt; None leaves it to the context.
        max_tokens: Tokens of an answer; None leaves it to the context.
        max_choices: Answers of one request.
        max_waiting: Answers that wait for a slot.
        grace: Seconds that running answers get when the service is told to end.
        log_prompts: Write requests, with all their text, to the log.
    """

    model: str
    rule: Rule = Rule.BLOCK
    api_keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()
    max_body: int = 1 << 20
    max_prompt: int | None = None
    max_tokens: int | None = None
    max_choices: int = 8
    max_waiting: int = 64
    grace: float = 10.0
    log_prompts: bool = False
