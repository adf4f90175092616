"""What is told of an error."""

from __future__ import annotations

from coserve.core.errors import QueueFull, failure_text


def test_the_end_of_a_request_or_job_is_told_with_the_errors_own_code_or_its_type_alone() -> None:
    assert failure_text(QueueFull("full")) == ("queue_full", "full")
    code, message = failure_text(ZeroDivisionError("/secret"))
    assert code == "internal_error"
    assert "ZeroDivisionError" in message and "/secret" not in message
