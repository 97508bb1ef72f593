"""The program of docs/howto/several_processes.md under torchrun; test_docs.py runs it in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "several_processes.md"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_program_of_the_page_runs_on_several_ranks(tmp_path: Path, ranks: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "program.py").write_text("".join(blocks))
    launch = ("--standalone", "--nproc-per-node", str(ranks), "program.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
