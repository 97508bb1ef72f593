"""Docstrings say "Example:"; mkdocstrings shows code only under "Examples:"."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section in what is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the text of one docstring."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE
            )
