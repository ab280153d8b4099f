def scratch(nbytes: int, target: object, stream: int) -> int:
    raise NotImplementedError
