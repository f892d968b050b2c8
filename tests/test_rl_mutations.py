"""The tests of rl.py are worth something: each of these deliberate mistakes makes the named tests fail.

    python -m pytest -q tests/test_rl_mutations.py
"""
from contextlib import contextmanager

import pytest
import torch

import rl
import test_rl
import training
from test_rl import exact  # noqa: F401  (fp32 here, too)

collate, action_logprobs, policy_loss, gae = training.collate, training.action_logprobs, rl.policy_loss, rl.gae
micro_loss, reference_policy, kl_estimate = rl.micro_loss, rl.reference_policy, rl.kl_estimate
state_features, value_loss = training.state_features, rl.value_loss


def shifted(by):
    def mutant(*arguments):
        micro = collate(*arguments)
        micro.action_mask = micro.action_mask.roll(by, dims=1)
        return micro
    return mutant


def without_eos(pairs, rows, policy):
    micro = collate(pairs, rows, policy)
    micro.action_mask &= micro.input_ids[:, 1:] != policy.eos_id
    micro.lengths = micro.action_mask.sum(-1)
    return micro


def biased_std(rewards, groups, norm_std):
    mean, divisor = torch.zeros_like(rewards), torch.ones_like(rewards)
    for group in set(groups):
        member = torch.tensor([g == group for g in groups])
        mean[member] = rewards[member].mean()
        if norm_std:
            divisor[member] = rewards[member].std(correction=0) + 1e-6
    return mean, divisor


def smaller_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip=None):
    ratio = (logprobs - old_logprobs).exp()
    loss = torch.minimum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    return loss.sum(), policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high)[1]


def own_mean(policy, micro, cfg):
    loss, sums = micro_loss(policy, micro, cfg)
    return loss / len(micro.advantages), sums


def halved(policy, micro, cfg):
    loss, sums = micro_loss(policy, micro, cfg)
    return loss / 2, sums


@contextmanager
def adapters_off(policy, ref):
    with policy.model.disable_adapter():
        yield policy


@contextmanager
def trained_adapter(policy, ref):
    yield policy


def reference_untempered(lm, micro, temperature, **options):
    is_reference = micro.old_logprobs is not None and not torch.is_grad_enabled()
    return action_logprobs(lm, micro, 1.0 if is_reference else temperature, **options)


def negative_entropy(*arguments, **options):
    logprobs, entropy = action_logprobs(*arguments, **options)
    return logprobs, entropy if entropy is None else -entropy


# mistake -> (function, broken variant, tests that must fail)
MUTANTS = {
    "mask one token late": ("collate", shifted(1), ["only_action_tokens_are_trained",
                                                    "logprobs_are_those_of_plain_transformers"]),
    "mask one token early": ("collate", shifted(-1), ["only_action_tokens_are_trained", "eos_is_an_action_token"]),
    "EOS outside the loss": ("collate", without_eos, ["eos_is_an_action_token"]),
    "advantage with the wrong sign": (
        "policy_loss", lambda new, old, advantages, *rest, **kw: policy_loss(new, old, -advantages, *rest, **kw),
        ["update_makes_good_actions_likelier", "gradient_is_the_analytic_one", "policy_loss_by_hand"]),
    "log-probs without temperature": (
        "action_logprobs", lambda lm, micro, temperature, **kw: action_logprobs(lm, micro, 1.0, **kw),
        ["logprobs_are_those_of_plain_transformers", "gradient_is_the_analytic_one",
         "samples_follow_the_scored_distribution"]),
    "reference without temperature": ("action_logprobs", reference_untempered, ["reference_is_the_warm_adapter"]),
    "no bootstrapping": ("gae", lambda r, v, bootstrap, gamma, lam: gae(r, v, 0.0, gamma, lam),
                         ["gae_by_hand", "truncated_episodes_bootstrap"]),
    "bootstrapping after the end": ("gae", lambda r, v, bootstrap, *rest: gae(r, v, bootstrap or v[-1], *rest),
                                    ["truncated_episodes_bootstrap", "longer_pages_change_no_advantage"]),
    "biased standard deviation": ("group_baseline", biased_std, ["group_advantages_by_hand"]),
    "optimistic clipping": ("policy_loss", smaller_surrogate, ["policy_loss_by_hand"]),
    "old log-probs from the new policy": (
        "policy_loss", lambda new, old, *rest, **kw: policy_loss(new, new.detach(), *rest, **kw),
        ["policy_loss_by_hand"]),
    "mean of micro-batch means": ("micro_loss", own_mean, ["micro_batches_change_nothing"]),
    "loss divided twice": ("micro_loss", halved, ["gradient_is_the_analytic_one"]),
    "KL with exchanged sides": ("kl_estimate", lambda new, ref, *rest: kl_estimate(ref, new, *rest),
                                ["kl_gradients_against_enumeration", "kl_is_applied_once"]),
    "base model as reference": ("reference_policy", adapters_off, ["reference_is_the_warm_adapter"]),
    "policy as its own reference": ("reference_policy", trained_adapter, ["only_the_trained_adapter_moves"]),
    "value of the first token": (
        "state_features", lambda policy, prompts, n: state_features(policy, [p[:1] for p in prompts], n),
        ["value_head_starts_at_zero"]),
    "smaller value error": (
        "value_loss", lambda v, r, old, clip=None: 0.5 * torch.minimum(
            (v - r) ** 2, (old + (v - old).clamp(-(clip or 9), clip or 9) - r) ** 2).sum(), ["value_loss_by_hand"]),
    "value clipped around itself": ("value_loss", lambda v, r, old, clip=None: value_loss(v, r, v.detach(), clip),
                                    ["value_loss_by_hand", "values_stay_near_those_before_the_update"]),
    "entropy punished": ("action_logprobs", negative_entropy, ["entropy_bonus_by_hand"]),
}


@pytest.mark.parametrize("mistake, test", [(name, test) for name, (*_, tests) in MUTANTS.items() for test in tests])
def test_mistake_is_caught(mistake, test, monkeypatch):
    name, mutant, _ = MUTANTS[mistake]
    function = getattr(test_rl, f"test_{test}")
    arguments = {"monkeypatch": monkeypatch, "kl_in": "none"}
    wanted = function.__code__.co_varnames[:function.__code__.co_argcount]
    for module in (rl, training, test_rl):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, mutant)
    with pytest.raises((AssertionError, RuntimeError)):
        function(**{argument: arguments[argument] for argument in wanted})
