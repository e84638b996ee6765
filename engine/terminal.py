"""Messages typed at a terminal: an editor of several lines, and a history."""

from __future__ import annotations

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output.defaults import create_output


class Terminal:
    """Messages typed by a person, with the history of this run; a paste is one message."""

    def __init__(self):
        keys, in_text = KeyBindings(), has_focus(DEFAULT_BUFFER)  # not in a search

        @keys.add("enter", filter=in_text)
        def _(event):
            buffer = event.current_buffer
            if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=in_text)
        def _(event):
            event.current_buffer.insert_text("\n")

        self._prompt = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=keys,
            reserve_space_for_menu=0,
            enable_suspend=True,
            # answers may go to a file, while a person types
            output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
        )

    def read(self, draft: str) -> str:
        """A message, edited from `draft` on; EOFError after Ctrl-D. Ctrl-C begins anew."""
        while True:
            try:
                # as a key; the signal, which comes where the keys are not yet read, would meet an
                # editor that does not run
                return self._prompt.prompt(default=draft, handle_sigint=False)
            except KeyboardInterrupt:
                draft = ""
