"""CUDA devices, events and captures, on stand-ins of torch.cuda that note the device of each call and its thread."""

import gc
import threading
import time
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import hybrid_engine
from hybrid_engine.containers.device import LAUNCHES
from hybrid_engine.generation import sampling, step
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.live.asynchronous import LiveThread
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.recorders import CudaGraphs
from hybrid_engine.generation.rollout.module_rollouts import ModuleRollouts
from hybrid_engine.metrics.latency import Stopwatch
from hybrid_engine.optim import masters
from hybrid_engine.optim.masters import Masters
from tests.support.models import build_model

SECOND = torch.device("cuda", 1)


class FakeCuda:
    """`torch.cuda` with two devices: each thread starts on the first, events end when `finish` is called."""

    def __init__(self):
        self._of_thread = threading.local()
        self.events = []

    @property
    def current(self):
        return getattr(self._of_thread, "index", 0)

    @contextmanager
    def device(self, device):
        before, self._of_thread.index = self.current, device.index
        yield
        self._of_thread.index = before

    def current_stream(self, device=None):
        return SimpleNamespace(device=self.current if device is None else device.index)

    def Event(self, enable_timing=False):
        event = FakeEvent(self, enable_timing)
        self.events.append(event)
        return event

    def finish(self):
        for event in self.events:
            event.is_done = True


class FakeEvent:
    def __init__(self, cuda, enable_timing):
        self.cuda, self.enable_timing, self.is_done, self.device = cuda, enable_timing, False, None

    def record(self, stream=None):
        self.device = (stream or self.cuda.current_stream()).device
        self.time = len(self.cuda.events) * 1e3

    def query(self):
        return self.is_done

    def synchronize(self):
        self.cuda.finish()

    def elapsed_time(self, end):
        assert self.enable_timing and end.enable_timing and self.is_done and end.is_done
        return end.time - self.time


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for name in ("device", "current_stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


class OnSecond(torch.Tensor):
    """A tensor that says it lies on the second GPU."""

    is_cuda = True
    device = SECOND


def test_drawn_tokens_are_awaited_on_the_device_that_has_them(cuda, monkeypatch):
    monkeypatch.setattr(sampling, "to_pinned", lambda values: values.as_subclass(torch.Tensor).clone())
    results = torch.tensor([[3.0, 5.0], [-0.5, -0.25], [0.0, 1.0]], dtype=torch.float64).as_subclass(OnSecond)
    draw = sampling.send_to_host(results)
    assert [event.device for event in cuda.events] == [1]
    assert draw.read() == ([3, 5], [-0.5, -0.25], [1], None, None, None)
    assert cuda.events[0].is_done


def test_a_stopwatch_keeps_the_events_of_unfinished_work_alone_and_misses_no_second(cuda):
    watch = Stopwatch(SECOND)
    for turn in range(100):
        if turn % 10 == 9:
            cuda.finish()
        with watch.measure():
            pass
        assert len(watch._events) <= 10
    assert {event.device for event in cuda.events} == {1}
    assert watch.seconds() == 100.0  # one second from each event to the next
    assert watch.seconds() == 100.0


def test_a_live_batch_takes_its_turns_on_the_device_of_the_model(cuda, monkeypatch):
    engine = hybrid_engine.init_inference(build_model(), dtype="fp32", max_out_tokens=64)
    monkeypatch.setattr(engine.generator, "device", SECOND)
    seen = []
    turn = step.Stopwatch.measure

    def measure(self):
        seen.append((threading.current_thread().name, cuda.current))
        return turn(self)

    monkeypatch.setattr(step.Stopwatch, "measure", measure)
    thread = LiveThread(lambda: live_batch(engine.generator, 32, 2), lambda progress: None, max_waiting=4)
    thread.start()
    thread.submit([Sequence(Prompt([5, 6, 7]), 0, GenerationOptions(max_new_tokens=3), 1)])
    thread.close()
    assert set(seen) == {("hybrid-engine-live", 1)}
    assert cuda.current == 0


@pytest.fixture
def captures(cuda, monkeypatch):
    """The graphs that are being recorded, each with the device and stream of it."""
    under_way, noted = [], []

    @contextmanager
    def graph(graph, pool, stream, capture_error_mode):
        assert not under_way, "two captures at once"
        under_way.append(graph)
        noted.append((cuda.current, stream.device))
        try:
            yield
        finally:
            under_way.remove(graph)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device.index))
    return noted


def test_captures_of_several_threads_wait_for_each_other_each_on_its_own_device(captures):
    """A capture that is under way is still so when the other thread has come to its own."""
    are_both_there = threading.Barrier(2)
    is_first = threading.Event()

    def record(index):
        graphs = CudaGraphs(torch.device("cuda", index))
        are_both_there.wait()

        def run():
            if not is_first.is_set():
                is_first.set()
                threading.Event().wait(0.05)

        graphs.capture(run)

    threads = [threading.Thread(target=record, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(captures) == [(0, 0), (1, 1)]


class Dropped:
    """In a cycle with itself, as a dropped engine is with its parts: only the collector frees it."""

    def __init__(self, part=None):
        self.own, self.part = self, part


@pytest.fixture
def collect_always():
    """Any allocation may begin a collection."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*thresholds)


def test_no_garbage_is_collected_while_a_graph_is_recorded(captures, collect_always):
    """The driver refuses to free a graph or a kernel's module then, and the capture is lost."""
    freed = []

    def run():
        weakref.finalize(Dropped(), freed.append, "in the capture")
        assert [Dropped() for _ in range(2000)] and not freed

    graphs = CudaGraphs(torch.device("cuda", 0))
    graphs.capture(run)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        graphs.capture(lambda: 1 / 0)
    assert gc.isenabled()
    gc.disable()
    try:
        freed.clear()
        graphs.capture(run)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a driver that refuses")
def test_a_graph_that_nobody_holds_spoils_no_capture(collect_always):
    values = torch.ones(8, device="cuda")
    Dropped(CudaGraphs(values.device).capture(lambda: values.add_(1)))
    replay = CudaGraphs(values.device).capture(lambda: [Dropped() for _ in range(2000)] and values.add_(1))
    replay()
    torch.cuda.synchronize()
    assert values[0] == 2


def can_capture():
    """Whether another thread could begin to record now."""
    return not LAUNCHES._lock.locked()


def test_a_thread_records_between_two_tokens_of_a_models_own_generate_and_not_inside_a_pass(monkeypatch):
    model, plain, passes, recorded = build_model(), build_model(), [], []
    rollouts = ModuleRollouts(model, gatherer=None, partners=None)
    monkeypatch.setattr(ModuleRollouts, "_device", SECOND)

    def record():
        with LAUNCHES:
            recorded.append(len(passes))

    threads = [threading.Thread(target=record) for _ in range(2)]

    def forward(*_):
        passes.append(can_capture())
        if len(passes) in (2, 5):
            threads[len(passes) // 4].start()
            while not LAUNCHES._turnstile.locked():  # until the thread has come to wait
                time.sleep(0.001)
        assert len(recorded) == (len(passes) > 2) + (len(passes) > 5)

    model.register_forward_pre_hook(forward)
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": True}
    torch.manual_seed(0)
    found = rollouts.generate(ids, **options)
    for thread in threads:
        thread.join()
    assert passes == [False] * 8 and recorded == [2, 5] and can_capture()
    torch.manual_seed(0)
    assert torch.equal(found, plain.generate(ids, **options))


def test_who_has_the_lock_twice_keeps_it_and_who_records_inside_does_not_wait_for_those_outside():
    got = threading.Event()
    thread = threading.Thread(target=lambda: [LAUNCHES.acquire(), got.set(), LAUNCHES.release()])
    with LAUNCHES, LAUNCHES:
        thread.start()
        while not LAUNCHES._turnstile.locked():
            time.sleep(0.001)
        LAUNCHES.let_others_in()
        with LAUNCHES:
            assert not got.is_set()
    thread.join()
    assert got.is_set() and can_capture()


def test_no_thread_records_while_an_engine_draws_dropout_in_either_pass(monkeypatch):
    """PyTorch refuses draws of its generator while one of its captures is under way, whichever thread they are from."""
    layer = torch.nn.Linear(2, 2)
    engine, *_ = hybrid_engine.initialize(
        model=layer, config={"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    )
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(("forward", can_capture())))
    monkeypatch.setattr(engine, "device", SECOND)
    loss = engine(torch.ones(1, 2)).sum()
    loss.register_hook(lambda grad: seen.append(("backward", can_capture())))
    engine.backward(loss)
    assert seen == [("forward", False), ("backward", False)]
    assert can_capture()


def test_all_gradients_of_an_offloaded_optimizer_are_on_their_way_before_one_is_awaited(cuda, monkeypatch):
    log = []

    class Grad:
        is_cuda, device = True, SECOND

        def __init__(self, value):
            self.value = value

        def to(self, device, non_blocking=False):
            log.append(("copy", device.type, non_blocking))
            return torch.tensor([self.value], dtype=torch.bfloat16)

    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: log.append(("wait", event.device)))
    parameters = [
        SimpleNamespace(name=name, has_master=True, param=SimpleNamespace(grad=None), master=torch.nn.Parameter(zero))
        for name, zero in (("a", torch.zeros(1)), ("b", torch.zeros(1)))
    ]
    held = Masters(parameters)
    for _ in range(2):
        for number, trained in enumerate(parameters):
            trained.param.grad = Grad(1.5 + number)
        held.take_gradients(parameters)
    assert log == [("copy", "cpu", True), ("copy", "cpu", True), ("wait", 1)] * 2
    assert [(p.master.grad.tolist(), p.master.grad.dtype) for p in parameters] == [
        ([3.0], torch.float32),
        ([5.0], torch.float32),
    ]
    assert all(trained.param.grad is None for trained in parameters)


def test_masters_in_host_memory_are_rounded_on_the_host_and_sent_without_waiting(monkeypatch):
    """A copy of pageable fp32 memory into 16 bits would wait for the device, one parameter after the other."""
    log = []

    class Sent(OnSecond):
        def copy_(self, source, non_blocking=False):
            log.append((source.dtype, any(source is tensor for tensor in pinned), non_blocking))
            return super().copy_(source)

    def pinned_like(tensor, dtype):
        pinned.append(torch.empty_like(tensor, dtype=dtype))
        return pinned[-1]

    pinned = []
    monkeypatch.setattr(masters, "_pinned_like", pinned_like)
    monkeypatch.setattr(masters, "fingerprint", lambda tensor: None)
    exact = torch.tensor([1.0, 1 / 3, -2.7])
    far = SimpleNamespace(has_master=True, param=torch.zeros(3, dtype=torch.bfloat16).as_subclass(Sent), master=exact)
    near = SimpleNamespace(has_master=True, param=torch.zeros(3, dtype=torch.bfloat16), master=exact)
    Masters([far, near]).write_back()
    assert log == [(torch.bfloat16, True, True)] and len(pinned) == 1
    for trained in (far, near):
        assert torch.equal(trained.param.as_subclass(torch.Tensor), exact.bfloat16())
