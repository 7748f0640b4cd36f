"""Checks of fused models under DeepSpeed and under the tensor parallelism of transformers."""

import os
from typing import Any

import torch
import torch.distributed as dist
from helpers.causal_lm import CLASSES, CausalLM
from helpers.rank_shards import FORMS, RATE, assert_steps, batches, gradients, stock_steps, whole
from torch.distributed.device_mesh import init_device_mesh

from partita.integrations.transformers import fuse, unfuse


def _set_environment() -> None:
    """Set what both libraries read although the process group is there."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def check_deepspeed(device: torch.device) -> None:
    """Compare ZeRO-1 to 3, whose gradients DeepSpeed gathers for us."""
    _set_environment()
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import safe_get_full_grad

    # It compiles collectives in shared memory otherwise, for half a minute, and then uses Gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, world = dist.get_rank(), dist.get_world_size()
    for form in FORMS:
        expected = stock_steps(form, world, rank, device)
        for stage in (1, 2, 3):
            config = {
                "train_micro_batch_size_per_gpu": 3,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
            }
            # The other way to ZeRO-3 makes the parameters in shards, and `fuse` comes last.
            late = form is FORMS[0] and stage > 1
            made_in_shards = late and stage == 3
            with deepspeed.zero.Init(config_dict_or_path=config, enabled=made_in_shards):
                model = CausalLM(**form)
            engine, *_ = deepspeed.initialize(
                model=model if late else fuse(model),
                optimizer=torch.optim.SGD(model.parameters(), RATE),
                config=config,
            )
            fuse(model)
            found = []
            assert engine.zero_optimization_stage() == stage
            for input_ids, labels in batches(rank, device):
                output = engine(input_ids, labels=labels)
                assert output.logits is None
                engine.backward(output.loss)
                named = model.named_parameters()
                grads = {name: safe_get_full_grad(parameter).clone() for name, parameter in named}
                found.append((whole(output.loss), grads))
                engine.step()
            assert_steps(found, expected)
            assert stage < 3 or model.lm_head.weight.numel() == 0, "it is released after its use"
            input_ids, labels = next(batches(rank, device))
            engine.eval()
            assert engine(input_ids, labels=labels).logits.shape[-1] == CLASSES
            engine.destroy()


def check_plan_of_transformers(device: torch.device) -> None:
    """Compare a Llama whose checkpoint `from_pretrained(tp_plan="auto")` loads in shards."""
    _set_environment()
    import transformers

    folder = os.environ["PARTITA_TEST_FOLDER"]
    sizes: dict[str, Any] = {"vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if dist.get_rank() == 0:
        stock.save_pretrained(folder)
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", device_mesh=mesh
    )
    own = model.lm_head.forward
    steps = {}
    for each in (stock.train(), fuse(model).train()):
        optimizer, found = torch.optim.SGD(each.parameters(), 0.1), []
        for input_ids, labels in batches(0, device):
            optimizer.zero_grad()
            output = each(input_ids, labels=labels)
            assert (output.logits is None) == (each is model)
            output.loss.backward()
            found.append((whole(output.loss), gradients(each)))
            optimizer.step()
        steps[each] = found
    assert_steps(steps[model], steps[stock])
    assert unfuse(model).lm_head.forward is own
