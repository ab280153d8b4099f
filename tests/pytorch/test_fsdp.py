"""FSDP2 over two processes of the CPU: FP8 parameters are sharded, and results have the bits of one process; states; and DDP."""

import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

PROGRAM = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor
    import fp8core.torch
    sys.path.insert(0, "tests")
    from pytorch.tensors import bits, wide

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)

    def model():
        made = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 64)).bfloat16()
        with torch.no_grad():
            for seed, parameter in enumerate(made.parameters()):
                parameter.copy_(wide(*parameter.shape, seed=seed) / 16)
        fp8core.torch.quantize_model_(made)
        return made

    mesh = init_device_mesh("cpu", (2,))
    sharded, whole = model(), model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    weight = sharded[0].weight
    print(isinstance(weight, DTensor), tuple(weight.to_local().shape) == (128, 128), weight.dtype == torch.float8_e4m3fn)
    for seed in range(3):
        x = wide(5, 128, seed=seed + 10 * rank)
        with torch.no_grad():
            print(bits(sharded(x)) == bits(whole(x)))

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    apart, cast = model(), model()
    for layer in (apart[0], apart[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(apart, mesh=mesh, mp_policy=policy)
    fully_shard(cast, mesh=mesh, mp_policy=policy)
    with torch.no_grad():
        print(bits(apart(x)) == bits(whole(x)))
        try:
            cast(x)
        except fp8core.DTypeError as error:
            print("weight needs an FP8 dtype" in str(error))

    folder, loaded = store + ".states", model()
    dcp.save(get_model_state_dict(sharded), checkpoint_id=folder)
    state = {name: torch.zeros_like(x) for name, x in loaded.state_dict().items()}
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    with torch.no_grad():
        print(bits(loaded(x)) == bits(whole(x)))
    try:
        get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    except RuntimeError as error:
        print("Invalid scalar type" in str(error))

    trained = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16), *model())
    replicated = nn.parallel.DistributedDataParallel(trained, init_sync=False)
    replicated(wide(5, 128, seed=20 + rank)).float().sum().backward()
    found = [torch.empty(128, 128, dtype=torch.bfloat16) for _ in range(2)]
    dist.all_gather(found, trained[0].weight.grad)
    print(bool(found[0].any()), torch.equal(*found))
    dist.barrier()  # neither leaves while the other still reads
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads free tensors late, and abort an interpreter that is ending: pytorch#179291
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name")
def test_fsdp_shards_codes_and_keeps_the_bits_and_ddp_trains_what_is_before_them(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}  # whatever this machine's name resolves to
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=240)
            assert rank.returncode == 0, out + err[-4000:]
            assert out.split() == ["True"] * 12, err[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
