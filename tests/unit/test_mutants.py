"""A planted fault whose text has moved proves nothing: each text must still be in the source."""

from __future__ import annotations

import pytest

from mutants import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_planted_fault_is_there(fault: Fault) -> None:
    text = (ROOT / "src" / "tickwheel" / fault.file).read_text()
    assert text.count(fault.old) == 1
    assert fault.old != fault.new
    files = fault.tests.partition(" -k ")[0].split()
    assert all((ROOT / each).exists() for each in files)
