"""A checkpoint as bytes: what `torch.save` writes, and a SHA-256 checksum of it behind.

`torch.load` reads the file as it is: it looks for the end of the archive from behind, and passes over the
checksum. But it verifies nothing, and would give parameters with flipped bits.
"""

import hashlib
import io
from typing import Any

import torch

from kronfac import KronfacError

FORMAT = 2
FORMAT_WITHOUT_CHECKSUM = 1
"""What was written before there were checksums."""
MARK = b"kronfac-sha256:"
DIGEST_BYTES = 64
"""Hexadecimal digits of SHA-256."""


class CheckpointError(KronfacError):
    """Bytes that are no checkpoint, or a damaged one."""


class NewerFormatError(CheckpointError):
    """A checkpoint of a format that this version does not know yet."""


def encode(state: dict[str, Any]) -> bytes:
    """The state as the content of a file."""
    buffer = io.BytesIO()
    torch.save({**state, "format": FORMAT}, buffer)
    content = buffer.getvalue()
    return content + MARK + hashlib.sha256(content).hexdigest().encode()


def decode(content: bytes, device: torch.device) -> dict[str, Any]:
    """The state that was encoded.

    Raises:
        CheckpointError: the bytes are not as they were written, or not of a checkpoint.
        NewerFormatError: a later version of kronfac wrote them.
    """
    end = len(content) - len(MARK) - DIGEST_BYTES
    checked = end >= 0 and content[end:].startswith(MARK)
    if checked and hashlib.sha256(content[:end]).hexdigest().encode() != content[end + len(MARK) :]:
        raise CheckpointError("is damaged: its checksum does not match its content.")
    try:
        state: dict[str, Any] = torch.load(
            io.BytesIO(content), weights_only=True, map_location=device
        )
    except (MemoryError, torch.OutOfMemoryError):  # of this machine, not of the bytes
        raise
    except Exception as error:  # of many kinds, depending on which byte is wrong
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"is damaged: {reason}") from error
    written = state.get("format") if isinstance(state, dict) else None
    if type(written) is int and written > FORMAT:
        raise NewerFormatError(
            f"has format {written}, and this kronfac reads formats up to {FORMAT}: continue the run "
            "with the newer kronfac that wrote it."
        )
    if written == FORMAT and not checked:
        raise CheckpointError("is damaged: its checksum is missing.")
    if written not in (FORMAT, FORMAT_WITHOUT_CHECKSUM):
        raise CheckpointError("is not a checkpoint that this kronfac can read.")
    return state
