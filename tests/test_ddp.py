"""DistributedDataParallel: two processes, half the batch each, one set of gradients."""

import torch
import torch.distributed as dist
from compare import TOLERANCE, assert_close, randomise
from ranks import spawn
from torch.nn.parallel import DistributedDataParallel

from mamba3 import Mamba3Config, Mamba3LM, ops

WORLD = 2
DTYPES = {"torch": torch.float64, "triton": torch.float32}
IDS = torch.randint(20, (2 * WORLD, 6), generator=torch.Generator().manual_seed(0))


def model_on(device, dtype):
    config = Mamba3Config(
        vocab_size=20, d_model=16, n_layer=1, d_state=6, headdim=16, d_intermediate=12,
        is_mimo=True, mimo_rank=2, is_outproj_norm=True,
    )  # fmt: skip
    return randomise(Mamba3LM(config, device=device, dtype=dtype), scale=0.3)


def gradients_of(model, run, ids):
    run(ids, labels=ids, return_logits=False).loss.backward()
    found = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def work(rank, folder, dtypes):
    """One process: save the gradients by every backend, of the model as it is and compiled."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    ids = IDS.chunk(WORLD)[rank].to(device)
    found = {}
    for backend, dtype in dtypes.items():
        with ops.use_backend(backend):
            model = model_on(device, dtype)
            parallel = DistributedDataParallel(model)
            found[backend] = gradients_of(model, parallel, ids)
            if backend == "torch":
                parallel = torch.compile(parallel, backend="aot_eager")
                found["compiled"] = gradients_of(model, parallel, ids)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_equal_one_process(tmp_path):
    spawn(work, (str(tmp_path), DTYPES), WORLD)
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert set(found) == {*DTYPES, "compiled"}
        for name, got in found.items():
            dtype = DTYPES.get(name, torch.float64)
            model = model_on("cpu", dtype)
            expected = gradients_of(model, model, IDS)
            assert_close(got, expected, 2 * TOLERANCE[dtype], f"rank {rank}, {name}")
