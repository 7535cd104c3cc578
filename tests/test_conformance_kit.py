"""The conformance kit against drafters that break the contract: each fault must be caught by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from specfw.contracts import Drafter, RequestView
from specfw.decoding.builder import DraftBuilder
from specfw.testing.conformance import DrafterConformance


class Counts(Drafter):
    """Guesses by how often it was asked, whoever asked."""

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root, limits in zip(builder.roots, builder.limits, strict=True):
            self.asked += 1
            if limits.max_nodes:
                builder.guess(int(root), [self.asked % 4])


class Hoards(Drafter):
    """Notes the number of every request."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def begin(self, request: RequestView) -> None:
        self.seen.append(request.id)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        """Drafts nothing."""


class Clings(Hoards):
    """Keeps every request."""

    def begin(self, request: RequestView) -> None:
        self.kept = [*getattr(self, "kept", []), request]


class Raises(Drafter):
    """Cannot draft."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Counts, "test_state_follows_the_committed_tokens"),
        (Counts, "test_batch_mates_do_not_matter"),
        (Counts, "test_the_same_request_again"),
        (Counts, "test_B11_an_earlier_request_leaves_nothing"),
        (Hoards, "test_a_thousand_requests_leave_nothing_behind"),
        (Clings, "test_a_request_that_ends_is_forgotten"),
        (Raises, "test_requests_join_leave_and_are_preempted"),
    ],
)
def test_the_kit_sees(broken: Callable[[], Drafter], test: str) -> None:
    """A check that such a drafter passes would pass every drafter."""

    class Kit(DrafterConformance):
        def make(self) -> Drafter:
            return broken()

    with pytest.raises(AssertionError):
        getattr(Kit(), test)()
