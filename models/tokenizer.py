"""Text to token ids and back, by a folder's tokenizer.json. Chat templates run in a limited process."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from models import added_tokens, chat_templates
from models.limited import Limited

FILE = "tokenizer.json"  # tokenizer.model, which many models have beside it, is not read
MARK = "\x01"  # stands for the text before a continuation: a character that is joined to no other
# No chat needs as much.
_render = Limited(chat_templates.__file__, "render", seconds=5, gib=1)


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with its special tokens and its chat template.

    Args:
        backend: the tokenizer itself.
        special_tokens: the texts of the special tokens by Hugging Face's names, such as {"bos_token": "<s>"}.
        chat_template: a Jinja template, or None.
        template_values: what the template gets beside the messages; see :meth:`with_values`.

    Attributes:
        bos, eos, pad: the ids of the special tokens that begin a text, end one, and pad a row; None if there is none.
        vocab_size: the number of ids, including added tokens.

    Example:
        >>> import models
        >>> _, tokenizer = models.load("retriever")
        >>> tokenizer.decode(tokenizer.encode("The code is 4719."))
        'The code is 4719.'
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        template_values: Mapping[str, Any] | None = None,
    ):
        self.backend = backend
        # A tokenizer.json may have been saved with truncation and padding; a prompt must stay whole.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.template_values = dict(template_values or {})

    def plain(self) -> Tokenizer:
        """Return the same tokenizer without a chat template."""
        return Tokenizer(self.backend, self.special_tokens)

    def with_values(self, **values: Any) -> Tokenizer:
        """Return the same tokenizer, whose chat template gets these values wherever a conversation is rendered.

        So :func:`models.ask` and the commands render with them, too. What there is to set is the template's own, such
        as ``enable_thinking`` (Qwen3, SmolLM3), ``tools`` and ``documents``.

        Example:
            >>> import models
            >>> backend = models.load("retriever")[1].backend
            >>> form = "{{ messages[0].content }}"
            >>> form += "{{ '' if enable_thinking else ' /no_think' }}"
            >>> tokenizer = models.Tokenizer(backend, chat_template=form)
            >>> brief = tokenizer.with_values(enable_thinking=False)
            >>> brief.chat([{"role": "user", "content": "Hello"}])
            'Hello /no_think'
        """
        return Tokenizer(self.backend, self.special_tokens, self.chat_template, self.template_values | values)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, tokenizer_config.json and its companions.

        As in transformers 5, tokens that only the companions name are added, and tokenizer.json alone says whether BOS
        and EOS are put around a text: a warning tells where "add_bos_token" or "add_eos_token" says otherwise.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file is damaged, or a companion gives a token another id than it gets.
        """
        folder = Path(folder)
        file = folder / FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no {FILE}; give a folder that holds one.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} is corrupted or of an unknown kind ({reason}); download it again.") from None
        contents = [read_object(folder / name) for name in added_tokens.COMPANIONS]
        try:
            config, added = added_tokens.companions(*contents)
            named, others = added_tokens.special_tokens(config)
            added_tokens.add_tokens(backend, added, [*named.values(), *others])
            special = {name: added_tokens.text_of(token) for name, token in named.items()}
            template = _chat_template(folder, config)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"the special tokens or the chat template beside {file} are damaged.") from None
        added_tokens.check_ids(backend, added, folder)
        made = cls(backend, special, template)
        ids = {"bos": made.bos, "eos": made.eos}
        added_tokens.warn_of_surroundings(backend, ids, config, str(folder / added_tokens.COMPANIONS[0]))
        return made

    @property
    def bos(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos(self) -> int | None:
        return self._id("eos_token")

    @property
    def pad(self) -> int | None:
        return self._id("pad_token")

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the special tokens that tokenizer.json adds (mostly a BOS).

        The text of :meth:`chat` contains them already: encode it with ``add_special_tokens=False``. A text that goes on
        where another ends is encoded by :meth:`continuation`.
        """
        _check_unicode(text)
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and ids[:2] == [self.bos] * 2 and self._ids(text)[:2] != ids[:2]:
            warnings.warn(
                f"the text begins with {self.special_tokens['bos_token']}, and the tokenizer puts another before it; "
                "if a chat template wrote it, encode the text with add_special_tokens=False.",
                stacklevel=2,
            )
        return ids

    def continuation(self, text: str, behind: int | None = None) -> list[int]:
        """Return the token ids of a text that goes on where another ends.

        It has neither special tokens of its own nor the blank that SentencePiece puts before a text: the ids of a text
        and of its continuation are those of both together, unless one token would reach across.

        Args:
            behind: the token before it, if it is known: behind a special token some vocabularies begin a text anew. By
                default it is one of ordinary text.

        Example:
            >>> import models
            >>> _, tokenizer = models.load("retriever")
            >>> tokens = tokenizer.encode("The code of amber falcon")
            >>> tokens += tokenizer.continuation(" is 4719.", tokens[-1])
            >>> tokens == tokenizer.encode("The code of amber falcon is 4719.")
            True
        """
        _check_unicode(text)
        special = behind in self._added
        mark, before = (self._added[behind], [behind]) if special else (MARK, self._marked)
        if special or len(before) > 1:  # else nothing is put before a text
            found = self.backend.encode(mark + text, add_special_tokens=False)
            last = len(before) - 1
            if found.ids[: last + 1] == before and (special or found.offsets[last][1] == len(mark)):
                return found.ids[last + 1 :]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _added(self) -> dict[int | None, str]:
        """Return the texts of the tokens that are found in a text before anything else is done to it."""
        return {index: token.content for index, token in self.backend.get_added_tokens_decoder().items()}

    @functools.cached_property
    def _marked(self) -> list[int]:
        """Return the ids of a mark, with those of what is put before a text."""
        return self._ids(MARK)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Return a decoder for ids that come one by one; see :class:`TextStream`."""
        return TextStream(self, skip_special_tokens)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **values: Any) -> str:
        """Return a conversation as text in the model's format; encode it with ``add_special_tokens=False``.

        Args:
            messages: turns such as {"role": "user", "content": "Hello"}.
            add_generation_prompt: whether to end with the header of the assistant's next turn.
            values: more that the template reads, as in transformers' ``apply_chat_template``: ``tools`` (a list of JSON
                schemas), ``documents``, and what a family's template has of its own, such as ``enable_thinking``. They
                come before those of :meth:`with_values`.

        Raises:
            ValueError: the tokenizer has no chat template, or the template rejects the messages.

        Example:
            >>> import models
            >>> backend = models.load("retriever")[1].backend
            >>> form = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
            >>> tokenizer = models.Tokenizer(backend, chat_template=form)
            >>> tokenizer.chat([{"role": "user", "content": "Hello"}])
            'user: Hello'
        """
        if self.chat_template is None:
            raise ValueError("this model's tokenizer has no chat template; encode plain text instead.")
        own = {"tools": None, "documents": None} | self.special_tokens | self.template_values | values
        if isinstance(own["tools"], list | tuple) and any(map(callable, own["tools"])):
            raise ValueError("tools has a function; give its JSON schema, an object.")
        given = dict(messages=list(messages), add_generation_prompt=add_generation_prompt)
        try:
            return _render(template=self.chat_template, values=own | given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the chat template rejected these messages: {error}") from None

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


class TextStream:
    """Decodes ids as they come, and returns only text whose last character is complete.

    The pieces that `add` and, at the end, `finish` return, joined, equal `Tokenizer.decode` of all ids.

    Example:
        >>> import models
        >>> _, tokenizer = models.load("retriever")
        >>> stream = tokenizer.stream()
        >>> [stream.add(token) for token in tokenizer.encode("té")], stream.finish()
        (['', 't', '', 'é'], '')
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens)
        # The ids of the last piece of text are decoded again with the new ids: a leading space depends on them.
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that this id completes, "" while a character's bytes are still missing."""
        self._pending.append(int(token))
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """Return the rest of the text after the last id: "", or U+FFFD for an incomplete character."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]


def read_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file, {} for a file that does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a JSON {type(content).__name__}, not an object; download it again.")
    return content


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at character {error.start}; decode it as UTF-8.") from None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return chat_template.jinja, else the template in tokenizer_config.json, or the "default" of several there."""
    file = folder / "chat_template.jinja"
    template = config.get("chat_template")
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        if template not in (None, text):
            warnings.warn(
                f"{file} is read, as transformers does, and not the different chat_template of tokenizer_config.json; "
                "delete the one that is out of date.",
                stacklevel=2,
            )
        return text
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
