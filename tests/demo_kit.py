"""What the tests of the demo and of its studies share."""

from concurrent.futures import Future


class InThisProcess:
    """In place of a pool of processes, which take longer to start than these students to train."""

    def __init__(self, workers: int):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, job, *arguments) -> Future:
        future = Future()
        future.set_result(job(*arguments))
        return future
