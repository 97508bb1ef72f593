"""An HTML page: a heading, sections, the command that made it; no script, no network."""

from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from kronfac import KronfacError
from kronfac_experiments.atomic_files import write_atomically


class PageError(KronfacError, ValueError):
    """A page can't be written."""


@dataclass(frozen=True)
class Page:
    """What a page consists of; HTML if nothing else is said.

    Args:
        title: Text.
        sections: Anchor, heading and content of each.
        command: Text: what to type for the same page.
        verdict: The outcome in a sentence.
    """

    title: str
    sections: list[tuple[str, str, str]]
    command: str
    verdict: str = ""

    @property
    def html(self) -> str:
        """The whole of it."""
        sections = [
            f'<section id="{anchor}">\n<h2>{heading}</h2>\n{content}\n</section>'
            for anchor, heading, content in self.sections
        ]
        return Template(packaged("page.html")).substitute(
            title=escape(self.title),
            css=packaged("page.css"),
            verdict=f'<p class="verdict">{self.verdict}</p>' if self.verdict else "",
            links="\n".join(
                f'<a href="#{anchor}">{heading}</a>' for anchor, heading, _ in self.sections
            ),
            sections="\n".join(sections),
            command=escape(self.command),
        )

    def write(self, output: Path) -> Path:
        """Write it and return where it is; an earlier one is replaced at once or not at all.

        Raises:
            PageError: it can't be written there.
        """
        # A folder's name may hold bytes that are no text.
        content = self.html.encode("utf-8", errors="replace")
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(output, lambda stream: stream.write(content))
        except OSError as error:
            raise PageError(
                f"The report cannot be written to '{output}': {error.strerror}. "
                "Name another file with --output."
            ) from error
        return output


def packaged(name: str) -> str:
    """The content of a file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def scrolling_table(caption: str, head: str, rows: list[str], name: str) -> str:
    """A table that scrolls sideways by itself, also with the keyboard; rows and head are HTML."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table id="{name}"><caption class="unseen">{escape(caption)}</caption>'
        f"<thead>{head}</thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )
