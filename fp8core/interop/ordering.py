"""The order of a launch among the streams of several frameworks: what it waits for, and what waits for it.

Streams that are captured into graphs follow a rule of their own. Within one capture they wait for each other as ever.
A captured stream does nothing before its graph is launched, so it cannot wait for one that is not captured, nor that
one for it: the order between a graph's launch and what other streams do is the caller's, as with all graphs.
"""

from collections.abc import Sequence

from fp8core.interop.tensor import Framework, TensorView


def order_before(stream: int, views: Sequence[TensorView], explicit: object = None) -> None:
    """Let the stream of a launch wait for what is still done to its operands.

    Args:
        stream: the stream to launch on.
        views: every operand, results given by the caller included; the first one's framework chose the stream.
        explicit: what the caller gave as ``stream=``, if anything. Then the operands may still be in the making on
            their own framework's current stream, that of the first included, and are waited for, as DLPack has it.

    Raises:
        DeviceError: an operand is made on a stream that is being captured into a graph, and ``stream`` is not.
    """
    if views[0].target.platform == "host":
        return
    ordered: set[Framework] = set() if explicit is not None else {views[0].framework}
    for view in views:
        framework = view.framework
        if view.held is not None:  # known array by array
            framework.order_before(view, stream, explicit)
        elif framework not in ordered:
            ordered.add(framework)
            framework.order_before(view, stream, explicit)


def order_after(stream: int, views: Sequence[TensorView], explicit: object = None) -> None:
    """Let the current streams of all other frameworks wait for a launch, and keep what the caller may drop now.

    After it, another framework may read a result in memory of its own, and use the memory of its operands again.
    The framework of the first operand works on ``stream``; if that was given explicitly, it does not wait (the caller
    orders two streams of one framework as usual), and the operands are kept until the stream has passed.
    """
    first = views[0]
    if first.target.platform == "host":
        return
    ordered = {first.framework}
    for view in views:
        framework = view.framework
        if view.held is not None:  # known array by array
            framework.release(view, stream)
        if framework is first.framework:
            if explicit is not None:
                framework.keep(view, stream)
        elif framework not in ordered:
            ordered.add(framework)
            framework.order_after(view, stream)
