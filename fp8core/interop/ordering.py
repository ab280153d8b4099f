"""Orders a launch among the streams of several frameworks: what it waits for, and what waits for it.

Streams under capture follow another rule. Within one capture they wait for each other as usual. A captured stream runs
nothing before its graph is launched, so it cannot wait for a stream that is not captured, and such a stream cannot wait
for it. As with all graphs, the caller orders the launch of a graph with the work of other streams.
"""

from collections.abc import Sequence

from fp8core.interop.frameworks import Framework
from fp8core.interop.tensor import TensorView


def order_before(stream: int, views: Sequence[TensorView], explicit: object = None) -> None:
    """Make the stream of a launch wait for pending work on the operands.

    Args:
        stream: the stream to launch on.
        views: all operands, including results that the caller gave; the framework of the first one chose the stream.
        explicit: the caller's ``stream=``, if any. Then even the first operand may still have pending work on its
            framework's current stream, and the launch waits for the streams of all operands, as in DLPack.

    Raises:
        DeviceError: an operand is produced on a stream that is being captured into a graph, and ``stream`` is not.
    """
    if views[0].target.platform == "host":
        return
    ordered: set[Framework] = set() if explicit is not None else {views[0].framework}
    for view in views:
        framework = view.framework
        if view.held is not None:  # each array may have a stream of its own
            framework.order_before(view, stream, explicit)
        elif framework not in ordered:
            ordered.add(framework)
            framework.order_before(view, stream, explicit)


def order_after(stream: int, views: Sequence[TensorView], explicit: object = None) -> None:
    """Make the current streams of all other frameworks wait for a launch, and keep operands that the caller may drop.

    Afterwards another framework may read a result in its own memory, and reuse the memory of its operands. The first
    operand's framework works on ``stream``. If the caller gave the stream explicitly, that framework does not wait (the
    caller orders two streams of one framework as usual), and its operands are kept until the stream has passed the
    launch.
    """
    first = views[0]
    if first.target.platform == "host":
        return
    ordered = {first.framework}
    for view in views:
        framework = view.framework
        if view.held is not None:  # each array may have a stream of its own
            framework.release(view, stream)
        if framework is first.framework:
            if explicit is not None:
                framework.keep(view, stream)
        elif framework not in ordered:
            ordered.add(framework)
            framework.order_after(view, stream)
