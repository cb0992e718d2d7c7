"""What the simulated network may do wrong, as one frozen value."""

from __future__ import annotations

import dataclasses

from expertwire.errors import InvalidArgumentError

NTH_FAULTS = ("operation", "post", "again", "lost")


@dataclasses.dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Probabilities per operation (0 … 1), and their limits in virtual nanoseconds. The default is a network without faults.

    Raises `InvalidArgumentError` for a probability outside 0 … 1 or a negative limit.
    """

    again: float = 0.0  # a burst of "try again" begins at this post
    again_burst_max: int = 8
    late_delivery: float = 0.0  # overtaken by what was posted after it
    late_delivery_max_ns: int = 50_000
    late_completion: float = 0.0  # completions come out of order
    late_completion_max_ns: int = 50_000
    early_local: float = 0.0  # "the source buffer is free" is reported before the bytes are visible at the target
    failed_post: float = 0.0
    failed_operation: float = 0.0  # completes with an error; the bytes may have landed in part
    lost_completion: float = 0.0  # it lands, and no completion ever comes
    fail_at: int = 0  # the k-th operation of the whole network fails; 0: none
    fail_how: str = "operation"  # … with an error; "post": at once; "again": a burst of pushing back; "lost": without a word
    duplicate: float = 0.0  # the completion comes twice
    wrong_generation: float = 0.0  # a completion for an older use of a slot comes as well
    null_context: float = 0.0  # an error completion that names no operation comes as well

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "fail_how" and value not in NTH_FAULTS:
                raise InvalidArgumentError(f"NetworkFaults.fail_how is {value!r}, but it must be one of {', '.join(NTH_FAULTS)}")
            if isinstance(field.default, float) and not 0.0 <= value <= 1.0:
                raise InvalidArgumentError(f"NetworkFaults.{field.name} is {value}, but a probability lies in 0 … 1")
            if isinstance(field.default, int) and value < 0:
                raise InvalidArgumentError(f"NetworkFaults.{field.name} is {value}, but it must not be negative")

    def can_fail(self) -> bool:
        """Whether an operation may end with an error."""
        nth = self.fail_at > 0 and self.fail_how != "again"
        return self.failed_post > 0 or self.failed_operation > 0 or self.lost_completion > 0 or nth

    def as_options(self) -> dict[str, float | int | str]:
        """The fields by name, as the native simulation takes them."""
        return dataclasses.asdict(self)
