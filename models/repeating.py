"""The words that ask a model to repeat its prompt, for policies that observe it while it does (KVzip), and others."""

from __future__ import annotations

import dataclasses
import functools

from kvjax import Policy, RepeatPrompt
from kvjax._src.chains import policy_of
from models.tokenizer import Tokenizer

# The words of KVzip's authors (arXiv 2505.23416, section 3.3), which kvpress takes over.
FIRST = "\n\nRepeat the previous context exactly."
FOLLOWING = "\n\nRepeat the part of the previous context exactly, starting with"


def with_repeat_prompt(policy: Policy | str | None, tokenizer: Tokenizer) -> Policy | None:
    """Return a policy that asks the model to repeat its prompt in words, as KVzip does; other policies are unchanged.

    Without it the model is fed the prompt a second time without being asked. In a model for chats the words end the
    user's turn, as its template does; in others a line. The words of :func:`kvjax.prompted` are its own.

    Example:
        >>> import models
        >>> _, tokenizer = models.load("retriever")
        >>> policy = models.with_repeat_prompt("kvzip", tokenizer)
        >>> tokenizer.decode(policy.needs.reconstruction.prompt.first)
        '\\n\\nRepeat the previous context exactly.'
    """
    policy = policy_of(policy)
    if policy is None or policy.repeats is None:
        return policy
    return asking(policy, repeat_prompt(tokenizer, policy.repeats.text))


def repeat_prompt(tokenizer: Tokenizer, text: str = "") -> RepeatPrompt:
    """Return the token ids that ask a model in words to repeat its prompt, or tell it a text."""
    said = (f"\n\n{text}", "") if text else (FIRST, FOLLOWING)
    first, following, suffix = (tuple(tokenizer.continuation(words)) for words in (*said, _suffix(tokenizer)))
    return RepeatPrompt(first, following, suffix)


@functools.cache  # equal arguments give the same object, so that a compiled program is found again
def asking(policy: Policy, prompt: RepeatPrompt) -> Policy:
    assert policy.needs.reconstruction is not None
    wanted = dataclasses.replace(policy.needs.reconstruction, prompt=prompt)
    return dataclasses.replace(policy, needs=dataclasses.replace(policy.needs, reconstruction=wanted))


def _suffix(tokenizer: Tokenizer) -> str:
    """Return the text between a user's words and the assistant's answer."""
    if tokenizer.chat_template is None:
        return "\n"
    marker = "#" * 13
    return tokenizer.chat([{"role": "user", "content": marker}]).partition(marker)[2]
