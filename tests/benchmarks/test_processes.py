"""Calls in processes of their own."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.processes import ProcessError, call


def test_a_call_in_a_process_of_its_own_tells_how_it_ended() -> None:
    assert call(os.getpid) != os.getpid()
    with pytest.raises(ProcessError, match="ValueError: could not convert"):
        call(float, "x")
    with pytest.raises(ProcessError, match="_exit ended its process with status 7"):
        call(os._exit, 7)
    with pytest.raises(ProcessError, match="sleep took longer than 1 s"):
        call(time.sleep, 60, timeout=1)
