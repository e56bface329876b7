"""An Adam as Transformer Engine's: no state before its first step, and one count of steps for all parameters of a group."""

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer

from megatron_rl.config.schema import AlgorithmConfig, Dtype, Init, Moments, Offload, OptimizerConfig, ParallelConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.errors import UserError
from megatron_rl.parallel import topology
from megatron_rl.training import losses, optimizer
from megatron_rl.training.engine import Engine
from tests.tiny_models import make_tiny_model


class FusedAdam(torch.optim.Optimizer):
    """Stands in for Transformer Engine's FusedAdam: its state layout, and AdamW's arithmetic in float32."""

    def __init__(self, params, lr, betas, eps, weight_decay, *, adam_w_mode, **precision):
        assert adam_w_mode and not precision.pop("store_param_remainders", False)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.dtypes = {name: precision.get(f"{name}_dtype", torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        self.keeps_main = precision.get("master_weights", False)
        assert self.keeps_main == precision.get("use_decoupled_grad", False)

    def initialize_state(self, parameter, store_param_remainders):
        state = self.state[parameter]
        state |= {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in self.dtypes.items()}
        if self.keeps_main:
            state["master_param"] = parameter.detach().clone().float()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad if self.keeps_main else parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self.initialize_state(parameter, False)
                main = state["master_param"] if self.keeps_main else parameter
                first = state["exp_avg"].float().lerp(gradient.float(), 1 - beta1)
                second = state["exp_avg_sq"].float().lerp(gradient.float() ** 2, 1 - beta2)
                root = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                main.mul_(1 - group["lr"] * group["weight_decay"])
                main.addcdiv_(first / (1 - beta1 ** group["step"]), root, value=-group["lr"])
                state["exp_avg"].copy_(first)
                state["exp_avg_sq"].copy_(second)
                parameter.copy_(main)


def without_looking_for_transformer_engine(config):
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = config.use_precision_aware_optimizer


@pytest.fixture(scope="module")
def place():
    yield topology.initialize(ParallelConfig(), seed=1)
    topology.destroy()


@pytest.fixture
def new_engine(place, tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=80)

    def build(*, fused=True, moments=Moments.float32, seed=1):
        with monkeypatch.context() as patch:
            if fused:
                patch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
                patch.setattr(megatron_optimizer, "is_te_min_version", lambda version: True)
                patch.setattr(megatron_optimizer, "Adam", FusedAdam)
                patch.setattr(distrib_optimizer, "Adam", FusedAdam)
                patch.setattr(MegatronOptimizerConfig, "__post_init__", without_looking_for_transformer_engine)
                patch.setattr(optimizer, "has_transformer_engine", lambda: True)
            return Engine(
                "policy",
                tmp_path / "model",
                parallel=ParallelConfig(),
                topology=place,
                optimizer=OptimizerConfig(lr=1e-2, moments=moments),
                init=Init.random,
                dtype=Dtype.bfloat16,
                offload=Offload.always,
                seed=seed,
            )

    return build


def update(engine):
    tokens = torch.arange(3, 19)
    batch = PackedBatch(tokens, torch.tensor([0, 16]), {"mask": tokens > 5})
    return engine.update([batch], losses.build("sft", AlgorithmConfig(), {"mask": float(batch.fields["mask"].sum())}))


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("moments", Moments)
def test_an_offloaded_model_without_updates_resumes_and_trains_identically(new_engine, tmp_path, moments):
    engine, resumed = new_engine(moments=moments), new_engine(moments=moments, seed=2)
    engine.offload()
    engine.save_state(tmp_path / "saved")
    assert not same(weights(engine), weights(resumed))
    resumed.load_state(tmp_path / "saved")
    for _ in range(2):
        assert update(engine) == update(resumed)
        assert same(weights(engine), weights(resumed))


ADAMS = {"torch": {"fused": False}, "fused": {}, "small moments": {"moments": Moments.bfloat16}}


@pytest.mark.parametrize("first", ADAMS)
@pytest.mark.parametrize("then", ADAMS)
def test_a_checkpoint_resumes_regardless_of_the_adam_that_wrote_it(new_engine, tmp_path, first, then):
    engine, resumed = new_engine(**ADAMS[first]), new_engine(**ADAMS[then], seed=2)
    start = weights(engine)
    for _ in range(2):
        update(engine)
    engine.save_state(tmp_path / "saved")
    resumed.load_state(tmp_path / "saved")
    assert update(resumed).grad_norm == update(engine).grad_norm
    found, expected = weights(resumed), weights(engine)
    if first == then:
        assert same(found, expected)
    # A wrong count of steps alone would change the third step, a third of the way, by its half.
    way = sum((expected[name] - start[name]).float().abs().sum() for name in start)
    assert sum((found[name] - expected[name]).float().abs().sum() for name in start) < 0.02 * way


def test_bfloat16_moments_save_four_bytes_and_train_nearly_alike(new_engine):
    engines = {moments: new_engine(moments=moments) for moments in Moments}
    start = weights(engines[Moments.float32])
    taken = {
        moments: sum(
            tensor.nbytes for tensor in optimizer.state_tensors(engine._optimizer) if tensor.dtype != torch.bfloat16
        )
        + sum(
            tensor.nbytes
            for part in engine._optimizer.chained_optimizers
            for state in part.optimizer.state.values()
            for tensor in state.values()
            if torch.is_tensor(tensor) and tensor.dtype == torch.bfloat16
        )
        for moments, engine in engines.items()
    }
    assert taken[Moments.float32] == 12 * sum(tensor.numel() for tensor in start.values())
    assert taken[Moments.bfloat16] * 12 == taken[Moments.float32] * 8
    for _ in range(8):
        for engine in engines.values():
            update(engine)
    ends = {moments: weights(engine) for moments, engine in engines.items()}
    way = sum((ends[Moments.float32][name] - start[name]).float().abs().sum() for name in start)
    apart = sum((ends[Moments.float32][name] - ends[Moments.bfloat16][name]).float().abs().sum() for name in start)
    print("apart / way", float(apart / way))
    assert 0 < apart < 0.02 * way


def test_bfloat16_moments_without_transformer_engine_are_refused(new_engine):
    with pytest.raises(UserError, match="moments=bfloat16 needs Transformer Engine"):
        new_engine(fused=False, moments=Moments.bfloat16)
