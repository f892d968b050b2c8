"""Every known way to get PPO or GRPO for language-model agents wrong: impossible here, or caught by a test.

    python -m pytest -q tests/test_rl.py

The numbers are those of the list of 76 pitfalls the project started from.  ``->`` names a test of this file, or
another file where it says so.

  1 length bias                 one sum over action tokens                -> equal_tokens_weigh_equally
  2 division by std             flag norm_std                             -> group_advantages_by_hand
  3 mean of micro-batch means   whole-step denominator                    -> micro_batches_change_nothing
  4 dividing twice              one division                              -> gradient_is_the_analytic_one
  5 two masks                   a masked row is never in the batch        -> masked_row_is_a_removed_row
  6 empty mask                  the step is left out and counted          -> nothing_to_learn_from_changes_nothing
  7 zero-variance groups        give no rows                              -> constant_groups_change_nothing
  8 group of one                UserError                                 -> group_of_one_raises
  9 wrong grouping key          groups are named by the caller            -> equal_texts_stay_two_groups
 10 different starts            ValueError                                -> group_mates_start_alike
 11 step-weighted baseline      per episode                               -> longer_failure_moves_no_baseline
 12 grouping by turn            impossible: a group is an Episode's field
 13 normalising twice           -> group_advantages_by_hand (sum 0), advantages_reach_their_own_tokens (unchanged)
 14 weighting                   -> equal_tokens_weigh_equally, denominators_are_what_they_are_called
 15 std estimator               -> group_advantages_by_hand
 16 whitening over padding      impossible: turns carry advantages, tokens lie flat; -> whitening
 17 last micro-batch's metrics  -> micro_batches_change_nothing, metrics_are_means_over_all_steps
 18 retokenisation              -> sampled_ids_are_kept
 19 unstable chat template      impossible: one row per turn, prompt as it was sampled from
 20 newline after end of turn   impossible: no text between turns; -> sampled_ids_are_kept (ends with EOS)
 21 double BOS                  test_llm.py::test_a_prompt_has_one_bos
 22 pad == eos                  -> eos_is_an_action_token
 23 padding and positions       -> padding_changes_no_logprob
 24 padding in generation       -> company_changes_no_greedy_answer
 25 fully padded rows           impossible: a row holds at least one prompt token and one action token
 26 temperature                 -> ratio_is_one_at_any_temperature, logprobs_are_those_of_plain_transformers
 27 top-k, top-p                impossible: own sampler without them; -> samples_follow_the_scored_distribution
 28 engine's log-probs          impossible: none are used
 29 top-1's log-prob            -> logprobs_are_those_of_plain_transformers
 30 sampler numerics            -> sampler_and_trainer_agree_in_low_precision, gap_.._is_measured
 31 other batch shapes          -> ratio_is_one_at_any_temperature (low precision, too)
 32 log-softmax in bf16         test_llm.py::test_log_softmax_is_fp32_in_bf16_too
 33 stale old log-probs         -> old_logprobs_are_taken_once
 34 dropout                     UserError                                 -> what_cannot_work_is_refused
 35 ratio overflow              -> rare_token_stays_finite, clip_bounds_are_not_exchanged
 36 sequence-level ratios       -> policy_loss_by_hand, clip_bounds_are_not_exchanged
 37 off by one                  -> logprobs_are_those_of_plain_transformers
 38 observation tokens          -> only_action_tokens_are_trained
 39 GAE through observations    impossible: GAE sees turns                -> longer_pages_change_no_advantage
 40 truncation                  -> gae_by_hand, truncated_episodes_bootstrap, last_prompt_of_a_truncated_episode
 41 context overflow            -> history_is_trimmed_never_the_state
 42 cut read as invalid         -> cut_is_not_invalid
 43 masking cut answers         -> masked_row_is_a_removed_row
 44 invalid actions             -> answers_have_fixed_readings, cut_is_not_invalid
 45 penalty on the wrong turn   -> penalty_stays_with_its_turn
 46 reward on padding           impossible: no reward tensor; -> advantages_reach_their_own_tokens
 47 simulator reward hacking    test_fidelity.py::test_an_agent_that_only_claims_success_wins_nothing_by_the_rule
 48 simulator drift             test_fidelity.py::test_what_a_dream_forgets_in_twenty_steps_is_counted
 49 retrieval leak              test_buffer.py
 50 split leaks                 tests of the environments
 51 shared back-end             tests of the environments
 52 small evaluation pools      test_fidelity.py::test_wilson_interval
 53 KL estimator's place        -> kl_gradients_against_enumeration, what_cannot_work_is_refused
 54 KL over padding             impossible: tokens lie flat; -> micro_batches_change_nothing
 55 KL applied once             -> kl_is_applied_once, kl_in_the_reward_is_paid_once
 56 entropy                     -> uniform_policy_has_entropy_ln_v, entropy_bonus_by_hand
 57 collapse                    -> alarms, entropy_bonus_by_hand
 58 value initialisation        -> value_head_starts_at_zero
 59 value loss moves policy     -> value_head_starts_at_zero (detached), critic_warm_up_leaves_the_policy_alone
 60 value clipping              -> value_loss_by_hand, values_stay_near_those_before_the_update
 61 Adam's first steps          -> first_step_is_bounded
 62 disable_adapter             -> reference_is_the_warm_adapter
 63 head in modules_to_save     impossible: outside PEFT; -> resuming_reproduces_the_next_step
 64 untrainable adapter         -> only_the_trained_adapter_moves, what_cannot_work_is_refused
 65 checkpointing, frozen base  -> checkpointing_changes_no_gradient
 66 k-bit preparation           test_backbones.py::test_types_of_4_bit_models
 67 modes and caches            -> modes_are_restored
 68 merged weights              never merged; test_backbones.py::test_4_bit_sampling_scores_as_in_training
 69 learning rate               test_rl_learning.py
 70 resume                      -> resuming_reproduces_the_next_step
 71 swallowed exceptions        -> failing_world_surfaces
 72 in-place writes             -> functions_leave_their_inputs_alone
 73 global RNG                  -> global_generators_are_untouched
 74 remainders                  -> every_row_is_dealt_once
 75 stale constants             test_config.py; rl.py reads every value from the configuration, tests from its defaults
 76 rotten tests                this file runs on every commit; test_rl_mutations.py breaks rl.py on purpose
"""
import copy
import math
import os
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rl_world import (Bandit, Corridor, Format, byte_tokenizer, config, mean_outcome, play, tiny_policy,
                      word_tokenizer)

import config as settings
import formats
import llm
import rl
import rollouts
import runs
import training
from config import UserError
from envs import Task
from rl import Row, gae, group_baseline, kl_estimate, policy_loss, value_loss
from rollouts import Episode, Turn


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """fp32 everywhere, so that equalities can be tested tightly."""
    torch.set_num_threads(1)
    monkeypatch.setattr(llm, "compute_dtype", lambda device: torch.float32)


# ------------------------------------------------------------------------------------------------ helpers
def episode(group, outcome, turns=1, invalid=(), task=None, truncated=False):
    made = [Turn("s", [2], [3, 1], "b", "s", 0.0, k in invalid, False) for k in range(turns)]
    made[-1].reward = outcome
    return Episode(task or Task("t", "text", "train"), group, made, not truncated, truncated, outcome == 1, outcome)


def random_rows(policy, lengths=((6, 2), (11, 1), (8, 4), (9, 3), (6, 6)), seed=0, low=2):
    """Rows with (prompt, action) lengths as given; actions end with EOS; advantages of both signs.  The usual lengths
    make 5, 3 or 1 forward passes of at most 1, 24 or many tokens."""
    g = torch.Generator().manual_seed(seed)
    high = len(policy.tokenizer)
    draw = lambda n: torch.randint(low, high, (n,), generator=g).tolist()
    return [Row(draw(p), draw(a - 1) + [policy.eos_id], i, 0.0, False, (-1) ** i * (1 + i / 4))
            for i, (p, a) in enumerate(lengths)]


def sgd(policy):
    """Plain descent: after one step the change of a weight is -lr times its gradient."""
    return torch.optim.SGD(policy.model.parameters(), lr=1.0)


def weights(policy):
    return [p.detach().clone() for p in policy.model.parameters()]


def gradient(rows, cfg, policy=None, ref=None, value=None):
    """The gradient that one ``update`` with one step follows, flat, and the update's metrics."""
    policy = policy or tiny_policy()
    before = weights(policy)
    metrics = rl.update(policy, ref, sgd(policy), rows, cfg, value, torch.Generator().manual_seed(0))
    return torch.cat([(b - p).flatten() for b, p in zip(before, weights(policy))]), metrics


def gradient_of(loss, policy):
    """The same for a loss that a test has written itself."""
    parts = torch.autograd.grad(loss, list(policy.model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts]).float()


ONE_STEP = dict(lr=1.0, max_grad_norm=1e9)


def plain_distributions(policy, row, temperature):
    """log pi over the vocabulary (A, V), where the action tokens were sampled, by transformers alone, in float64."""
    logits = policy.model(input_ids=torch.tensor([row.prompt_ids + row.action_ids])).logits[0].double()
    return (logits / temperature).log_softmax(-1)[len(row.prompt_ids) - 1:-1]


def plain_logprobs(policy, row, temperature):
    """log pi of the action tokens (A,)."""
    return torch.stack([p[token] for p, token in zip(plain_distributions(policy, row, temperature), row.action_ids)])


def logprobs(policy, rows, temperature=1.0, **options):
    pairs = [(row.prompt_ids, row.action_ids) for row in rows]
    return training.action_logprobs(policy, training.collate(pairs, range(len(rows)), policy), temperature, **options)


def scripted(monkeypatch, answers):
    """Let the sampler return these texts (None: an answer that never ends), whatever the prompts."""
    answers = iter(answers)

    def generate(lm, prompts, **options):
        texts = [next(answers) for _ in prompts]
        return [llm.Sample(lm.encode("a a a"), True) if t is None else llm.Sample([*lm.encode(t), lm.eos_id], False)
                for t in texts]
    monkeypatch.setattr(llm, "generate", generate)


# ------------------------------------------------------------------------------------------------ advantages
def test_group_advantages_by_hand():
    r = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0])
    groups = ["x"] * 8 + ["y"] * 8
    mean, divisor = group_baseline(r, groups, norm_std=False)
    assert ((r - mean) / divisor)[[0, 8]].tolist() == [0.875, 0.5]
    for size, wins in ((2, 1), (4, 1), (8, 3)):                # unbiased standard deviation of 0/1 rewards
        r = torch.tensor([1.0] * wins + [0.0] * (size - wins))
        mean, divisor = group_baseline(r, ["x"] * size, norm_std=True)
        p = wins / size
        assert divisor[0].item() == pytest.approx(math.sqrt(p * (1 - p) * size / (size - 1)) + 1e-6, abs=1e-6)
        advantages = (r - mean) / divisor
        assert advantages[0].item() == pytest.approx((1 - p) / divisor[0].item(), abs=1e-6)
        assert advantages.sum().abs() < 1e-5
    mean, divisor = group_baseline(torch.ones(4), ["x"] * 4, norm_std=True)
    assert ((torch.ones(4) - mean) / divisor).tolist() == [0.0] * 4


def test_group_of_one_raises():
    with pytest.raises(UserError, match="rl.group_size"):
        rl.rows_from([episode("a", 1.0), episode("a", 0.0), episode("b", 1.0)], config())


def test_equal_texts_stay_two_groups():
    a, b = Task("a", "same text", "train"), Task("b", "same text", "train")
    stats = rl.group_stats([episode("0/a", 1.0, task=a), episode("0/a", 0.0, task=a),
                            episode("0/b", 1.0, task=b), episode("0/b", 1.0, task=b)])
    assert [(s.task, s.size, s.mean, s.variance) for s in stats.values()] == [(a, 2, 0.5, 0.25), (b, 2, 1.0, 0.0)]


def test_longer_failure_moves_no_baseline():
    short = [episode("g", 1.0), episode("g", 0.0), episode("g", 0.0)]
    long = [episode("g", 1.0), episode("g", 0.0, turns=7), episode("g", 0.0)]
    (a, *_, b), _ = rl.rows_from(short, config())
    (c, *_, d), _ = rl.rows_from(long, config())
    assert (a.advantage, b.advantage) == (c.advantage, d.advantage)


def test_penalty_stays_with_its_turn():
    clean, _ = rl.rows_from([episode("g", 1.0, turns=3), episode("g", 0.0, turns=2)], config(invalid_penalty=0.1))
    dirty, _ = rl.rows_from([episode("g", 1.0, turns=3, invalid=[1]), episode("g", 0.0, turns=2)],
                            config(invalid_penalty=0.1))
    change = [(c.advantage - d.advantage) * d.divisor for c, d in zip(clean, dirty)]
    assert change == pytest.approx([0, 0.1, 0, 0, 0], abs=1e-6)
    assert [c.reward - d.reward for c, d in zip(clean, dirty)] == pytest.approx([0, 0.1, 0, 0, 0])


def test_gae_by_hand():
    # delta_1 = 1 + .5 * 2 - 4 = -2;  delta_0 = 0 + .5 * 4 - 1 = 1;  A_1 = -2, A_0 = 1 + .5 * .5 * -2 = .5
    advantages, returns = gae(torch.tensor([0.0, 1]), torch.tensor([1.0, 4]), bootstrap=2.0, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [0.5, -2.0] and returns.tolist() == [1.5, 2.0]
    # A chain of reward 1 forever, cut after three turns: with bootstrap every return is 1 / (1 - gamma).
    chain, zero = torch.ones(3), torch.zeros(3)
    assert gae(chain, zero, bootstrap=10.0, gamma=0.9, lam=1.0)[1].tolist() == pytest.approx([10.0] * 3)
    assert gae(chain, zero, bootstrap=0.0, gamma=0.9, lam=1.0)[1].tolist() == pytest.approx([2.71, 1.9, 1.0])


def test_truncated_episodes_bootstrap():
    """Through ``assign_advantages``: V = 10 everywhere, reward 1 a turn; terminated and truncated differ in V alone."""
    policy = tiny_policy()
    value = rl.ValueHead(32, 1e-2)
    torch.nn.init.constant_(value.linear.bias, 10.0)
    rows = random_rows(policy)[:4]
    for row, number in zip(rows, (0, 0, 1, 1)):
        row.episode, row.reward = number, 1.0
    rows[1].bootstrap_ids = [2, 3]
    cfg = config(algorithm="ppo", gamma=0.9, whiten=False)
    micros = [training.collate([(row.prompt_ids, row.action_ids)], [0], policy) for row in rows]
    for i, micro in enumerate(micros):
        micro.rows = [i]
    rl.assign_advantages(policy, rows, micros, cfg, value, None)
    got = [micro.advantages[0].item() for micro in micros]
    assert got == pytest.approx([0.0, 0.0, 1.9 - 10, 1 - 10], abs=1e-4)


def test_last_prompt_of_a_truncated_episode():
    cut = episode("g", 0.0, turns=2, truncated=True)
    cut.final_prompt_ids = [2, 3]
    rows, _ = rl.rows_from([cut, episode("g", 1.0)], config(algorithm="ppo"))
    assert [row.bootstrap_ids for row in rows] == [[], [2, 3], []]


def test_longer_pages_change_no_advantage():
    rewards, values = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.1, 0.2, 0.3])
    short = [Row([2], [3], e, 0.0, False) for e in (0, 0, 1)]
    long = [Row([2] * 50, [3], e, 0.0, False) for e in (0, 0, 1)]
    a, b = (rl.turn_advantages(rows, rewards, values, torch.zeros(3), 0.9, 0.9) for rows in (short, long))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert a[0].tolist() == pytest.approx([0.2 * 0.9 - 0.1 + 0.81 * 0.8, 0.8, -0.3])    # episode 1 is on its own


def test_whitening():
    a = rl.whiten(torch.tensor([1.0, 2.0, 3.0]))
    assert a.sum().abs() < 1e-6 and a.square().mean().item() == pytest.approx(1, abs=1e-4)
    assert rl.whiten(torch.tensor([5.0])).tolist() == [5.0]


# ------------------------------------------------------------------------------------------------ losses
def test_policy_loss_by_hand():
    """Ratios are per token: 1.5 and 0.5 stay apart, their product would be 0.75."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 10.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    loss, sums = policy_loss(ratio.log(), torch.zeros(5), advantages, clip_low=0.2, clip_high=0.3)
    # min(1.5, 1.3) + min(.5, .8) - max(1.5, 1.3) - max(.5, .8) - max(10, 1.3)
    assert -loss.item() == pytest.approx(1.3 + 0.5 - 1.5 - 0.8 - 10.0, abs=1e-5)
    assert sums["clip_fraction"].item() == 2
    bounded, _ = policy_loss(ratio.log(), torch.zeros(5), advantages, 0.2, 0.3, dual_clip=3.0)
    assert -bounded.item() == pytest.approx(1.3 + 0.5 - 1.5 - 0.8 - 3.0, abs=1e-5)


def test_rare_token_stays_finite():
    for advantage in (1.0, -1.0):
        x = torch.tensor([1000.0, -1000.0], requires_grad=True)
        loss, _ = policy_loss(x, torch.zeros(2), torch.full((2,), advantage), 0.2, 0.2)
        loss = loss + kl_estimate(x, torch.zeros(2), "k3").sum() + kl_estimate(x, torch.zeros(2), "k2").sum()
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(x.grad).all()


def test_value_loss_by_hand():
    values, returns, old = torch.tensor([2.0, 0.0, 1.1]), torch.tensor([3.0, 3.0, 1.0]), torch.tensor([0.0, 0.0, 1.0])
    assert value_loss(values, returns, old).item() == pytest.approx(0.5 * (1 + 9 + 0.01))
    # near the old value: .5, 0, 1.1 -> errors 6.25, 9, .01; the larger of both counts
    assert value_loss(values, returns, old, clip=0.5).item() == pytest.approx(0.5 * (6.25 + 9 + 0.01))


def test_kl_gradients_against_enumeration():
    """Three tokens, all expectations exact: which estimator follows the gradient of KL(policy || reference)?"""
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    other = torch.tensor([-0.4, 0.3, 0.2], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    exact_kl = (logp.exp() * (logp - ref)).sum()
    true, = torch.autograd.grad(exact_kl, logits, retain_graph=True)

    def as_loss(estimator, sampler):                           # E over sampled tokens of the estimate's gradient
        return torch.autograd.grad((sampler.exp().detach() * kl_estimate(logp, ref, estimator, sampler.detach())).sum(),
                                   logits, retain_graph=True)[0]
    reward = kl_estimate(logp.detach(), ref, "k1")             # policy gradient with the estimate as a cost
    in_reward, = torch.autograd.grad((logp.exp().detach() * reward * logp).sum(), logits, retain_graph=True)
    close = lambda x: torch.allclose(x, true, atol=1e-9)
    assert close(in_reward) and close(as_loss("k2", logp)) and close(as_loss("k3_weighted", logp))
    assert close(as_loss("k3_weighted", other)) and not close(as_loss("k2", other))     # samples of an old policy
    assert not close(as_loss("k3", logp)) and as_loss("k1", logp).abs().max() < 1e-9
    for estimator in ("k1", "k3"):                             # both have the right *value*
        value = (logp.exp() * kl_estimate(logp, ref, estimator)).sum()
        assert value.item() == pytest.approx(exact_kl.item(), abs=1e-9)


def test_functions_leave_their_inputs_alone():
    a, b, c = torch.randn(3, 6).unbind()
    before = [x.clone() for x in (a, b, c)]
    policy_loss(a, b, c, 0.2, 0.2, 3.0)
    kl_estimate(a, b, "k3_weighted", c)
    value_loss(a, b, c, 0.1)
    gae(a, b, 1.0, 0.9, 0.9)
    group_baseline(a, ["x"] * 6, True)
    rl.whiten(a)
    assert all(torch.equal(x, y) for x, y in zip(before, (a, b, c)))


# ------------------------------------------------------------------------------------------------ forward passes
def test_only_action_tokens_are_trained():
    policy = tiny_policy(tokenizer=byte_tokenizer())
    pairs = [(policy.encode("long observation: "), [*policy.encode("click buy"), policy.eos_id]),
             (policy.encode("page "), [*policy.encode("back"), policy.eos_id])]
    micro = training.collate(pairs, [0, 1], policy)
    tokens = micro.input_ids[:, 1:][micro.action_mask].split(micro.lengths.tolist())
    assert [t.tolist() for t in tokens] == [a for _, a in pairs]
    assert [policy.decode(t.tolist()) for t in tokens] == ["click buy", "back"]


def test_eos_is_an_action_token():
    tokenizer = word_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token                  # as SmolLM2 has it
    policy = tiny_policy(tokenizer=tokenizer)
    rows = random_rows(policy)
    pairs = [(row.prompt_ids, row.action_ids) for row in rows]
    micro = training.collate(pairs, range(len(rows)), policy)
    assert (micro.input_ids[:, 1:][micro.action_mask] == policy.eos_id).sum() == len(rows)
    only_eos = [Row(row.prompt_ids, [policy.eos_id], 0, 0.0, False, 1.0) for row in rows]
    assert gradient(only_eos, config(**ONE_STEP), tiny_policy(tokenizer=tokenizer))[0].abs().max() > 0


def test_logprobs_are_those_of_plain_transformers():
    policy, rows = tiny_policy(layers=2), random_rows(tiny_policy())
    for T in (1.0, 0.7):
        got, entropy = logprobs(policy, rows, T, with_entropy=True)
        assert got.dtype == entropy.dtype == torch.float32
        assert torch.allclose(got.double(), torch.cat([plain_logprobs(policy, row, T) for row in rows]), atol=1e-5)


def test_padding_changes_no_logprob():
    policy, rows = tiny_policy(layers=2), random_rows(tiny_policy())
    together, _ = logprobs(policy, rows)
    alone = torch.cat([logprobs(policy, [row])[0] for row in rows])
    assert torch.allclose(together, alone, atol=1e-5)


def test_company_changes_no_greedy_answer():
    policy = tiny_policy(layers=2)
    alone = llm.generate(policy, [[2, 3]], max_new_tokens=5, temperature=0)
    beside = llm.generate(policy, [[2, 3], [4, 3, 2] * 8], max_new_tokens=5, temperature=0)
    assert alone[0].ids == beside[0].ids


def test_samples_follow_the_scored_distribution():
    policy, n = tiny_policy(), 6000
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(4)                    # far from uniform
    samples = llm.generate(policy, [[2, 3]] * n, max_new_tokens=1, temperature=0.7,
                           generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=5) / n
    rows = [Row([2, 3], [t], 0, 0.0, False) for t in range(5)]
    assert (counts - logprobs(policy, rows, 0.7)[0].exp()).abs().max() < 0.03


def test_sampler_and_trainer_agree_in_low_precision(monkeypatch):
    monkeypatch.setattr(llm, "compute_dtype", lambda device: torch.bfloat16)
    policy, rows = tiny_policy(), random_rows(tiny_policy())
    got, _ = logprobs(policy, rows)
    assert got.dtype == torch.float32
    sampler = copy.copy(policy)
    sampler.model = policy.sampler().float()
    with torch.no_grad():
        expected = torch.cat([plain_logprobs(sampler, row, 1.0) for row in rows]).float()
    assert (got - expected).abs().mean() < 0.01
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(3)
    assert not torch.equal(policy.sampler().lm_head.weight.float(), sampler.model.lm_head.weight)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_gap_between_sampler_and_trainer_is_measured(monkeypatch, dtype, most, temperature):
    monkeypatch.setattr(llm, "compute_dtype", lambda device: dtype)
    policy = tiny_policy()
    prompts = [[2, 3], [4, 3, 2, 2], [3] * 9, [2, 3]]
    samples = llm.generate(policy, prompts, 6, temperature, torch.Generator().manual_seed(0))
    episodes = [episode(str(i // 2), float(i % 2)) for i in range(4)]
    for e, prompt, sample in zip(episodes, prompts, samples):
        e.turns[0].prompt_ids, e.turns[0].action_ids, e.turns[0].logprobs = prompt, sample.ids, sample.logprobs
    rows, _ = rl.rows_from(episodes, config())
    cfg = config(temperature=temperature, micro_tokens=12)
    metrics = rl.update(policy, None, sgd(policy), rows, cfg)
    assert 0 <= metrics["sampler_gap"] < most and not any("disagree" in a for a in training.alarms(metrics, 10**9))
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(3)                    # what a forgotten weight sync looks like
    metrics = rl.update(policy, None, sgd(policy), rows, cfg)
    assert metrics["sampler_gap"] > 0.05 and any("disagree" in a for a in training.alarms(metrics, 10**9))


def test_uniform_policy_has_entropy_ln_v():
    policy = tiny_policy()
    torch.nn.init.zeros_(policy.model.lm_head.weight)
    _, entropy = logprobs(policy, random_rows(policy), with_entropy=True)
    assert entropy.tolist() == pytest.approx([math.log(5)] * len(entropy), abs=1e-6)


def test_packs_hold_every_row_once_with_little_padding():
    rng = random.Random(0)
    lengths = [rng.randint(20, 400) for _ in range(200)] + [5000]
    packs = training.pack(lengths, micro_tokens=2000)
    assert sorted(i for p in packs for i in p) == list(range(201))
    for p in packs:
        rounded = [llm.round_up(lengths[i], training.LENGTHS) for i in p]
        assert len(p) == 1 or len(p) * max(rounded) <= 2000
        assert sum(rounded) >= 0.9 * len(p) * max(rounded)
    assert training.pack([5] * 4, micro_tokens=2000) == [[0, 1, 2, 3]]


def test_padding_stays_under_a_tenth():
    """As passes through the model have it, rows of usual lengths: home and item pages, result pages, and options."""
    policy, rng = tiny_policy(), random.Random(0)
    usual = lambda: max(20, round(rng.choices([rng.gauss(27, 2), rng.gauss(61, 5), rng.gauss(164, 5),
                                               rng.uniform(20, 250)], [20, 45, 30, 5])[0]))
    for count in (64, 128, 512):
        rows = random_rows(policy, lengths=[(usual(), rng.randint(2, 18)) for _ in range(count)])
        steps = training.deal(rows, policy, config(minibatches=4), None, 4)
        micros = [micro for step in steps for micro in step.micros]
        tokens, cells = sum(m.attention_mask.sum() for m in micros), sum(m.attention_mask.numel() for m in micros)
        assert 1 - tokens / cells < 0.1, count
        assert len(micros) < count / 2                         # and the passes are not single rows


def test_every_row_is_dealt_once():
    policy = tiny_policy()
    rows = random_rows(policy, lengths=[(3, 2)] * 7)
    steps = training.deal(rows, policy, config(minibatches=3), None, 3)
    assert sorted(i for step in steps for micro in step.micros for i in micro.rows) == list(range(7))
    assert [step.sizes["turns_of_step"] for step in steps] == [3, 2, 2]


@pytest.mark.parametrize("kept, taken", [(1.0, 4), (0.5, 2), (0.3, 1), (0.0, 1)])
def test_dropped_groups_make_fewer_steps_not_smaller_ones(kept, taken):
    rows = random_rows(tiny_policy(), lengths=[(3, 2)] * 8)
    assert rl.update(tiny_policy(), None, sgd(tiny_policy()), rows, config(minibatches=4), kept=kept)["steps"] == taken


# ------------------------------------------------------------------------------------------------ update
def test_gradient_is_the_analytic_one():
    """One step of ``update`` follows the gradient of the textbook loss, written without masks or batches."""
    policy = tiny_policy()
    rows = random_rows(policy)
    got, metrics = gradient(rows, config(temperature=0.7, **ONE_STEP), tiny_policy())
    losses = [-row.advantage * plain_logprobs(policy, row, 0.7).sum() for row in rows]
    loss = sum(losses) / sum(len(row.action_ids) for row in rows)
    expected = gradient_of(loss, policy)
    assert torch.allclose(got, expected, atol=1e-6) and expected.abs().max() > 1e-3
    assert metrics["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


def test_entropy_bonus_by_hand():
    """Without advantages the gradient is that of -0.3 times the mean entropy of the action tokens' distributions."""
    policy, rows = tiny_policy(), random_rows(tiny_policy())
    for row in rows:
        row.advantage = 0.0
    got, metrics = gradient(rows, config(entropy_coef=0.3, temperature=0.7, **ONE_STEP))
    logp = torch.cat([plain_distributions(policy, row, 0.7) for row in rows])
    bonus = -0.3 * -(logp.exp() * logp).sum(-1).mean()
    expected = gradient_of(bonus, policy)
    assert torch.allclose(got, expected, atol=1e-6) and expected.abs().max() > 1e-3
    assert metrics["loss"] == pytest.approx(bonus.item(), abs=1e-5)


def test_update_makes_good_actions_likelier():
    policy = tiny_policy()
    rows = [Row([2, 3], [2, 1], 0, 0.0, False, 1.0), Row([2, 3], [4, 1], 1, 0.0, False, -1.0)]
    before, _ = logprobs(policy, rows)
    rl.update(policy, None, sgd(policy), rows, config(lr=0.1))
    after, _ = logprobs(policy, rows)
    assert after[0] > before[0] and after[2] < before[2]


@pytest.mark.parametrize("kl_in", ["none", "loss"])
def test_micro_batches_change_nothing(kl_in):
    results = []
    for micro_tokens, passes in ((1, 5), (24, 3), (4096, 1)):
        (step,) = training.deal(random_rows(tiny_policy()), tiny_policy(), config(micro_tokens=micro_tokens), None, 1)
        assert len(step.micros) == passes
        cfg = config(micro_tokens=micro_tokens, kl_in=kl_in, kl_coef=0.5, entropy_coef=0.1, **ONE_STEP)
        ref = tiny_policy(seed=1) if kl_in == "loss" else None
        results.append(gradient(random_rows(tiny_policy()), cfg, tiny_policy(), ref))
    for g, metrics in results[1:]:
        assert torch.allclose(g, results[0][0], atol=1e-6)
        assert metrics == pytest.approx(results[0][1], abs=1e-5)


def test_metrics_are_means_over_all_steps():
    """Steps too small to move the policy: one or three of them see the same tokens, hence the same means."""
    one, three = (gradient(random_rows(tiny_policy()), config(minibatches=n, lr=1e-12), ref=tiny_policy(1))[1]
                  for n in (1, 3))
    assert (one["steps"], three["steps"]) == (1, 3)
    for name in ("loss", "policy_loss", "entropy", "ref_k1", "ref_k3"):
        assert three[name] == pytest.approx(one[name], abs=1e-5) and one[name] != 0, name


def test_equal_tokens_weigh_equally():
    x = torch.zeros(11, requires_grad=True)                    # a row of one token, a row of ten, equal advantage
    policy_loss(x, torch.zeros(11), torch.ones(11), 0.2, 0.2)[0].backward()
    assert x.grad.tolist() == [-1.0] * 11


def test_denominators_are_what_they_are_called():
    rows = random_rows(tiny_policy(), lengths=((3, 1), (3, 10), (3, 2)))
    rows[1].episode = 0                                        # 13 tokens, 3 turns, 2 episodes
    g = {name: gradient(rows, config(loss_denominator=name, **ONE_STEP))[0]
         for name in ("tokens_of_step", "turns_of_step", "episodes_of_step")}
    assert torch.allclose(g["turns_of_step"] * 3, g["tokens_of_step"] * 13, atol=1e-5)
    assert torch.allclose(g["episodes_of_step"] * 2, g["tokens_of_step"] * 13, atol=1e-5)


def test_advantages_reach_their_own_tokens():
    policy, cfg = tiny_policy(), config(micro_tokens=24, minibatches=2)
    rows = random_rows(policy)
    micros = [micro for step in training.deal(rows, policy, cfg, None, 2) for micro in step.micros]
    rl.score(policy, None, micros, cfg)
    rl.assign_advantages(policy, rows, micros, cfg, None, None)
    for micro in micros:
        expected = [rows[i].advantage for i in micro.rows for _ in rows[i].action_ids]
        assert micro.advantages.tolist() == pytest.approx(expected)


def test_masked_row_is_a_removed_row():
    rows = random_rows(tiny_policy())
    rows[2].cut = True
    without = [row for row in rows if not row.cut]
    masked, _ = gradient(rows, config(mask_cut=True, **ONE_STEP))
    assert torch.allclose(masked, gradient(without, config(**ONE_STEP))[0], atol=1e-6)
    assert not torch.allclose(masked, gradient(rows, config(mask_cut=False, **ONE_STEP))[0], atol=1e-4)


def test_nothing_to_learn_from_changes_nothing():
    policy = tiny_policy()
    rows = random_rows(policy)
    for row in rows:
        row.cut = True
    before = weights(policy)
    optimizer = training.make_optimizer(policy, config(weight_decay=0.1))
    metrics = rl.update(policy, None, optimizer, rows, config(mask_cut=True, entropy_coef=0.1))
    assert metrics["empty_steps"] == 1 and metrics["steps"] == 0
    assert all(metrics[name] is None for name in (*rl.SUMS, "grad_norm")) and training.alarms(metrics, 5) == []
    assert all(torch.equal(x, y) for x, y in zip(before, weights(policy)))


def test_constant_groups_change_nothing():
    rows, metrics = rl.rows_from([episode("a", 1.0, turns=2)] * 3 + [episode("b", 0.0, invalid=[0])] * 3,
                                 config(invalid_penalty=0.1))
    assert rows == [] and metrics == {"groups": 2, "constant_groups": 1.0, "kept": 0.0}
    everything, metrics = rl.rows_from([episode("a", 1.0, turns=2), episode("b", 0.0)], config(algorithm="ppo"))
    assert len(everything) == 3 and metrics["kept"] == 1       # PPO learns from all of them
    policy = tiny_policy()
    before = weights(policy)
    rl.update(policy, tiny_policy(1), training.make_optimizer(policy, config(weight_decay=0.1)), rows,
              config(kl_in="loss", kl_coef=1.0, entropy_coef=1.0, minibatches=2))
    assert all(torch.equal(x, y) for x, y in zip(before, weights(policy)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_ratio_is_one_at_any_temperature(monkeypatch, algorithm, dtype):
    monkeypatch.setattr(llm, "compute_dtype", lambda device: dtype)
    policy = tiny_policy()
    cfg = config(algorithm=algorithm, temperature=0.7, micro_tokens=24, lr=1e-2)
    value = rl.ValueHead(32, 1e-2) if algorithm == "ppo" else None
    metrics = rl.update(policy, None, sgd(policy), random_rows(policy), cfg, value)
    assert metrics["abs_log_ratio"] == 0.0 and metrics["steps"] == 1


def test_old_logprobs_are_taken_once(monkeypatch):
    policy, rows = tiny_policy(), random_rows(tiny_policy(), lengths=[(3, 2)] * 4)
    seen = []
    original = rl.policy_loss

    def watched(new, old, *rest, **options):
        seen.append((new.detach().clone(), old.clone()))
        return original(new, old, *rest, **options)
    monkeypatch.setattr(rl, "policy_loss", watched)
    rl.update(policy, None, sgd(policy), rows, config(lr=0.5, epochs=3))
    assert len(seen) == 3 and all(torch.equal(old, seen[0][1]) for _, old in seen)
    assert torch.equal(*seen[0]) and not torch.allclose(*seen[1]) and not seen[0][1].requires_grad


def test_clip_bounds_are_not_exchanged(monkeypatch):
    seen = []

    def watched(new, old, advantages, clip_low, clip_high, dual_clip):
        seen.append((clip_low, clip_high, dual_clip))
        return policy_loss(new, old, advantages, clip_low, clip_high, dual_clip)
    monkeypatch.setattr(rl, "policy_loss", watched)
    gradient(random_rows(tiny_policy()), config(clip_low=0.1, clip_high=0.3, dual_clip=5.0))
    assert seen == [(0.1, 0.3, 5.0)]


def kl_by_hand(rows, policy, ref):
    """For each row log pi of the action tokens, with gradient, and the reference's."""
    return [(plain_logprobs(policy, row, 1.0), plain_logprobs(ref, row, 1.0).detach()) for row in rows]


def test_kl_is_applied_once():
    rows, policy, ref = random_rows(tiny_policy()), tiny_policy(), tiny_policy(seed=1)
    p, r = (torch.cat(x) for x in zip(*kl_by_hand(rows, policy, ref)))
    for estimator, kl in (("k2", 0.5 * (r - p) ** 2), ("k3", (r - p).exp() - 1 - (r - p))):
        g = {c: gradient(rows, config(kl_in="loss", kl_coef=c, kl_estimator=estimator, **ONE_STEP), ref=ref)[0]
             for c in (0.0, 0.3, 0.6)}
        expected = gradient_of(kl.mean(), policy)
        assert torch.allclose(g[0.3] - g[0.0], 0.3 * expected, atol=1e-5) and expected.abs().max() > 1e-3
        assert torch.allclose(g[0.6] - g[0.0], 0.6 * expected, atol=1e-5)
        assert torch.equal(gradient(rows, config(kl_in="none", kl_coef=9.0, **ONE_STEP), ref=ref)[0], g[0.0])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_kl_in_the_reward_is_paid_once(algorithm):
    """Each turn pays for its own tokens, and with the divisor of its group: GRPO's advantages are quotients."""
    policy, ref = tiny_policy(), tiny_policy(seed=1)
    rows = random_rows(policy)
    for row in rows:
        row.divisor = 0.5
    g = {c: gradient(rows, config(algorithm=algorithm, whiten=False, kl_in="reward", kl_estimator="k1", kl_coef=c,
                                  micro_tokens=24, **ONE_STEP), ref=ref,
                     value=rl.ValueHead(32, 1e-2) if algorithm == "ppo" else None)[0] for c in (0.0, 0.3)}
    pairs = kl_by_hand(rows, policy, ref)
    cost = sum((p - r).sum().detach() * p.sum() for p, r in pairs) / sum(len(p) for p, _ in pairs)
    expected = gradient_of(cost, policy) / (0.5 if algorithm == "grpo" else 1)
    assert torch.allclose(g[0.3] - g[0.0], 0.3 * expected, atol=1e-5) and expected.abs().max() > 1e-3


def test_policy_that_moved_too_far_stops_early():
    policy, rows = tiny_policy(), random_rows(tiny_policy())
    metrics = rl.update(policy, None, sgd(policy), rows, config(lr=0.5, epochs=5, target_kl=1e-6))
    assert metrics["stopped_early"] == 1 and metrics["steps"] == 1
    assert all(p.grad is None for p in policy.model.parameters())


def test_bad_steps_are_skipped_and_the_third_ends_the_run():
    policy, rows = tiny_policy(), random_rows(tiny_policy())
    rows[0].advantage = float("nan")
    before = weights(policy)
    optimizer = training.make_optimizer(policy, config())
    for _ in range(2):
        assert rl.update(policy, None, optimizer, rows, config())["skipped_steps"] == 1
    resumed = training.make_optimizer(policy, config())
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(UserError, match="not finite"):
        rl.update(policy, None, resumed, rows, config())
    assert all(torch.equal(x, y) for x, y in zip(before, weights(policy)))
    rl.update(policy, None, optimizer, random_rows(policy), config())                   # a good step starts anew
    assert rl.update(policy, None, optimizer, rows, config())["skipped_steps"] == 1


def test_out_of_memory_is_explained(monkeypatch):
    policy, rows = tiny_policy(), random_rows(tiny_policy())
    before, calls = weights(policy), []
    original = rl.micro_loss

    def hungry(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return original(*arguments)
    monkeypatch.setattr(rl, "micro_loss", hungry)
    with pytest.raises(UserError, match="rl.micro_tokens.*gradient_checkpointing.*max_prompt_tokens"):
        rl.update(policy, None, sgd(policy), rows, config(micro_tokens=1))
    assert all(torch.equal(x, y) for x, y in zip(before, weights(policy)))
    assert all(p.grad is None for p in policy.model.parameters())


def settings_in(message):
    """The values of all settings that a message names; KeyError for one that does not exist."""
    cfg = settings.load(Path(__file__).parent.parent / "configs" / "webshop.yaml", "cpu")[0].model_dump()
    return {f"{section}.{key}": cfg[section][key] for section, key in re.findall(r"([a-z]\w+)\.([a-z]\w+)", message)}


def out_of_memory(*arguments, **options):
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("section", ["policy", "mexp"])
def test_supervised_stages_name_their_own_settings(monkeypatch, section):
    """A pass of theirs holds as many tokens as the smaller of the batch and ``rl.micro_tokens`` says."""
    lm, row = tiny_policy(), llm.Row([2, 3], [4, 1])
    for batch_tokens, micro_tokens in ((64, 256), (256, 64)):
        with monkeypatch.context() as patch, pytest.raises(UserError) as error:
            patch.setattr(llm, "sft_loss", out_of_memory)
            llm.sft(lm, lambda rng: row, 2, batch_tokens, 1e-2, "adamw", 0, micro_tokens=micro_tokens, section=section)
        assert "lower rl.micro_tokens below 64," in str(error.value)
        assert settings_in(str(error.value)).keys() == {
            "rl.micro_tokens", f"{section}_model.gradient_checkpointing", f"{section}_model.max_prompt_tokens"}
    monkeypatch.setattr(llm, "token_weights", lambda row, *rest: torch.full((3,), math.inf))
    with pytest.raises(UserError, match="not finite") as error:
        llm.sft(lm, lambda rng: row, 4, 64, 1e-2, "adamw", seed=0, section=section)
    assert settings_in(str(error.value)).keys() == {f"{section}.lr"}


def test_rl_names_its_own_settings(monkeypatch):
    policy, rows = tiny_policy(), random_rows(tiny_policy())
    with monkeypatch.context() as patch, pytest.raises(UserError) as error:
        patch.setattr(rl, "micro_loss", out_of_memory)
        rl.update(policy, None, sgd(policy), rows, config(micro_tokens=96))
    assert "lower rl.micro_tokens below 96," in str(error.value)
    assert settings_in(str(error.value)).keys() == {
        "rl.micro_tokens", "policy_model.gradient_checkpointing", "policy_model.max_prompt_tokens"}
    for owner, name, model in ((llm, "generate", "policy_model"), (Bandit, "step", "mexp_model")):
        with monkeypatch.context() as patch, pytest.raises(UserError) as error:
            patch.setattr(owner, name, out_of_memory)
            play(policy, Bandit, 2)
        assert settings_in(str(error.value)).keys() == {
            f"{model}.max_prompt_tokens", f"{model}.max_new_tokens", "rl.tasks_per_step"}
    value = rl.ValueHead(32, 1e-2)
    for rate, nan in (("rl.value_lr", "reward"), ("rl.lr", "advantage")):
        for row in rows:
            row.advantage = row.reward = 1.0
            setattr(row, nan, math.nan)
        critic = value if nan == "reward" else None
        with pytest.raises(UserError, match="not finite") as error:
            for _ in range(3):
                rl.update(policy, None, sgd(policy), rows, config(algorithm="ppo" if critic else "grpo", minibatches=3),
                          critic)
        assert settings_in(str(error.value)).keys() == {rate}


def test_first_step_is_bounded():
    """Adam turns a gradient of any size into a step of about lr: warm-up and eps bound the first ones."""
    for warmup, eps, bound in ((0, 1e-8, 1e-3), (10, 1e-8, 1e-4), (0, 1e-3, 1e-8)):
        p = torch.nn.Parameter(torch.zeros(1))
        p.grad = torch.full((1,), 1e-9)
        optimizer = torch.optim.AdamW([p], lr=1.0, eps=eps, weight_decay=0.0)
        assert training.optimizer_step(optimizer, lr=1e-3, warmup=warmup, max_grad_norm=1.0) == pytest.approx(1e-9)
        assert 0 < p.detach().abs().item() <= bound


def test_what_cannot_work_is_refused():
    policy, value = tiny_policy(), rl.ValueHead(32, 1e-2)
    for changes, ref, critic, message in [
            (dict(temperature=0.0), None, None, "rl.temperature"),
            (dict(algorithm="ppo"), None, None, "rl.algorithm"), (dict(), None, value, "rl.algorithm"),
            (dict(kl_in="loss"), None, None, "rl.kl_in"), (dict(kl_in="loss", kl_estimator="k1"), policy, None, "k1"),
            (dict(kl_in="reward", kl_estimator="k3"), policy, None, "k1"),
            (dict(kl_in="loss", kl_estimator="k9"), policy, None, "k9")]:
        with pytest.raises(UserError, match=message):
            rl.update(policy, ref, sgd(policy), random_rows(policy), config(**changes), critic)
    policy.model.config.attention_dropout = 0.1
    for random_policy in (policy, adapted_policy(lora_dropout=0.1)):
        with pytest.raises(UserError, match="dropout"):
            rl.update(random_policy, None, None, random_rows(policy), config())
    with pytest.raises(UserError, match="trainable"):
        training.make_optimizer(llm.LM(policy.model.requires_grad_(False), policy.tokenizer, policy.device), config())


def test_alarms():
    policy, cfg = tiny_policy(), config(lr=1e-9)
    stuck = [Row([2], [3] * 20 + [1], i, 0.0, False, 1.0) for i in range(4)]
    fine = [Row([2], [3, 1], i, 0.0, False, 1.0) for i in range(4)]
    metrics = rl.update(policy, None, sgd(policy), stuck, cfg)
    assert metrics["repetition"] > 0.8 and any("repeat" in line for line in training.alarms(metrics, 10**9))
    metrics = rl.update(policy, None, sgd(policy), fine, cfg)
    assert training.alarms(metrics, 10**9) == [] and "random" in training.alarms(metrics, 5)[0]
    assert "deterministic" in training.alarms(metrics | {"entropy": 0.0}, 5)[0]
    for algorithm, expected in (("grpo", ["all episodes of every group end alike"]), ("ppo", [])):
        _, groups = rl.rows_from([episode("a", 1.0)] * 2, config(algorithm=algorithm))
        found = training.alarms(groups | metrics | {"entropy": None}, 5)
        assert [line.split(":")[0] for line in found] == expected


# ------------------------------------------------------------------------------------------------ critic
def test_value_head_starts_at_zero():
    policy = tiny_policy()
    value = rl.ValueHead(32, 1e-2)
    features = training.state_features(policy, [[2, 3], [4, 3, 2, 2]], 4096)
    assert value(features).tolist() == [0.0, 0.0] and value.linear.weight.dtype == torch.float32
    alone = training.state_features(policy, [[2, 3]], 4096)
    assert torch.allclose(features[0], alone[0], atol=1e-5) and not features.requires_grad
    hidden = policy.model(input_ids=torch.tensor([[2, 3]]), output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(features[0], hidden[0, -1], atol=1e-5)


def test_critic_warm_up_leaves_the_policy_alone():
    policy, value = tiny_policy(), rl.ValueHead(32, 1e-2)
    rows = random_rows(policy)
    rows[0].reward = 1.0
    before, ids = weights(policy), torch.tensor([[2, 3, 4]])
    logits = policy.model(input_ids=ids).logits
    cfg = config(algorithm="ppo", value_warmup=1)
    first = rl.update(policy, None, sgd(policy), rows, cfg, value)
    assert first["steps"] == 0 and value.linear.weight.abs().max() > 0 and first["return_mean"] == pytest.approx(0.2)
    assert all(torch.equal(x, y) for x, y in zip(before, weights(policy)))
    assert torch.equal(logits, policy.model(input_ids=ids).logits)
    second = rl.update(policy, None, sgd(policy), rows, cfg, value)
    assert second["steps"] == 1 and second["explained_variance"] > first["explained_variance"]


def test_values_stay_near_those_before_the_update():
    """Clipped around V = 0, the value stops a few steps of Adam behind 0.1; around itself it would go on to 2."""
    value = rl.ValueHead(1, 1e-2)
    rl.fit_value(value, torch.zeros(4, 1), torch.full((4,), 10.0), config(value_clip=0.1, value_epochs=200))
    assert 0.1 < value(torch.zeros(1, 1)).item() < 0.3


# ------------------------------------------------------------------------------------------------ adapters
def adapted_policy(lora_dropout=0.0):
    """The tiny policy with a LoRA adapter that has been trained before."""
    from peft import LoraConfig, get_peft_model
    policy = tiny_policy()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy.model = get_peft_model(policy.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"],
                                                               lora_dropout=lora_dropout))
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.5)
    return policy


def test_reference_is_the_warm_adapter():
    policy, rows = adapted_policy(), random_rows(tiny_policy())
    current, _ = logprobs(policy, rows)
    with policy.model.disable_adapter():
        assert not torch.allclose(current, logprobs(policy, rows)[0], atol=1e-3)        # the base is something else
    ref = training.freeze_reference(policy)
    metrics = rl.update(policy, ref, training.make_optimizer(policy, config()), rows,
                        config(kl_in="loss", kl_coef=0.1, lr=1e-9, temperature=0.7))
    assert metrics["ref_k1"] == metrics["ref_k3"] == 0.0
    plain = tiny_policy()
    metrics = rl.update(plain, training.freeze_reference(plain), sgd(plain), rows, config(kl_in="loss", lr=1e-9))
    assert metrics["ref_k1"] == metrics["ref_k3"] == 0.0


def test_only_the_trained_adapter_moves():
    policy, rows = adapted_policy(), random_rows(tiny_policy())
    ref = training.freeze_reference(policy)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    for _ in range(2):
        metrics = rl.update(policy, ref, training.make_optimizer(policy, config()), rows,
                            config(kl_in="loss", kl_coef=0.1))
    assert metrics["ref_k3"] > 0
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and moved == {name for name in before if ".default." in name}
    assert {name for name, p in policy.model.named_parameters() if p.requires_grad} == moved


def test_checkpointing_changes_no_gradient():
    rows = random_rows(tiny_policy())
    g = {}
    for on in (False, True):
        policy = adapted_policy()
        if on:
            policy.model.enable_input_require_grads()
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            assert policy.model.is_activation_checkpointing
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters() if "lora" in name}
        optimizer = torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad], lr=1.0)
        rl.update(policy, None, optimizer, rows, config(**ONE_STEP))
        after = dict(policy.model.named_parameters())
        g[on] = {name: before[name] - after[name].detach() for name in before}
    assert all(x.abs().max() > 0 for name, x in g[True].items() if "lora_B" in name)
    assert all(torch.allclose(g[True][name], g[False][name], atol=1e-6) for name in g[True])


def test_modes_are_restored():
    policy = tiny_policy()
    answers = {}
    for training_mode in (True, False):
        policy.model.train(training_mode)
        answers[training_mode] = [t.action_ids for e in play(policy, Bandit, 4, temperature=0) for t in e.turns]
        rl.update(policy, None, sgd(policy), random_rows(policy), config(lr=1e-12))
        assert policy.model.training == training_mode
        assert all(m.training == training_mode for m in policy.model.modules())
    assert answers[True] == answers[False]


# ------------------------------------------------------------------------------------------------ resume, processes
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_resuming_reproduces_the_next_step(tmp_path, algorithm):
    cfg = config(algorithm=algorithm, lr_warmup=5, minibatches=2)

    def fresh():
        policy = tiny_policy()
        value = rl.ValueHead(32, cfg.value_lr) if algorithm == "ppo" else None
        return policy, training.make_optimizer(policy, cfg), value

    def step(policy, optimizer, value, number):
        rows = random_rows(policy, seed=number)
        rows[0].reward = 1.0
        return rl.update(policy, None, optimizer, rows, cfg, value, torch.Generator().manual_seed(number))
    policy, optimizer, value = fresh()
    step(policy, optimizer, value, 1)
    runs.save_state(tmp_path / "policy.safetensors",
                    {"model": policy.model.state_dict(), "adam": optimizer.state_dict()})
    if value:
        runs.save_state(tmp_path / "value.safetensors", value.state())
    expected = step(policy, optimizer, value, 2)
    again, adam, head = fresh()
    state = runs.load_state(tmp_path / "policy.safetensors")
    again.model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])
    if head:
        head.restore(runs.load_state(tmp_path / "value.safetensors"))
    assert step(again, adam, head, 2) == expected
    assert all(torch.equal(x, y) for x, y in zip(weights(policy), weights(again)))
    if head:
        assert torch.equal(head.linear.weight, value.linear.weight)


def _one_of_two(rank, port, algorithm, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    policy, metrics, rows = _uneven_update(algorithm, slice(0, 4) if rank == 0 else slice(4, 5))
    bad = [Row([2], [3, 1], 0, 0.0, False, float("nan") if rank else 1.0)]             # one process alone is in trouble
    skipped = rl.update(policy, None, sgd(policy), bad, config())["skipped_steps"]
    none = rl.update(policy, None, sgd(policy), rows if rank else [], config(lr=1e-9))["steps"]
    torch.save([weights(policy), metrics, skipped, none], f"{folder}/{rank}")
    dist.destroy_process_group()


def _uneven_update(algorithm, part):
    policy = tiny_policy()
    rows = random_rows(policy)
    for row, reward in zip(rows, (1.0, 0.0, 0.5, 0.0, 1.0)):
        row.reward = reward
    value = rl.ValueHead(32, 1e-2) if algorithm == "ppo" else None
    cfg = config(algorithm=algorithm, kl_in="loss", kl_coef=0.1, micro_tokens=16, lr=0.1, target_kl=1.0, epochs=2)
    return policy, rl.update(policy, tiny_policy(1), sgd(policy), rows[part], cfg, value), rows[part]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_two_processes_take_the_step_of_one(tmp_path, algorithm):
    port = 20000 + os.getpid() % 20000
    processes = torch.multiprocessing.start_processes(_one_of_two, (port, algorithm, str(tmp_path)), nprocs=2,
                                                      join=False, start_method="fork")
    while not processes.join(timeout=60):
        pass
    (w0, m0, skipped0, steps0), (w1, m1, skipped1, steps1) = (torch.load(tmp_path / str(r)) for r in (0, 1))
    policy, metrics, _ = _uneven_update(algorithm, slice(0, 5))
    assert m0 == m1 == pytest.approx(metrics, abs=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(w0, w1)) and (skipped0, skipped1, steps0, steps1) == (1, 1, 1, 1)
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(w0, weights(policy)))


# ------------------------------------------------------------------------------------------------ rollouts
def test_sampled_ids_are_kept(monkeypatch):
    """'a' + 'b' as sampled, though the tokenizer would write one token 'ab' for the text."""
    policy = tiny_policy(tokenizer=byte_tokenizer(merges=[("a", "b")]))
    policy.spaced = False
    a, b = policy.encode("a")[0], policy.encode("b")[0]
    odd = [a, b, *policy.encode("  "), policy.eos_id]
    monkeypatch.setattr(llm, "generate", lambda lm, prompts, **options: [llm.Sample(list(odd), False) for _ in prompts])
    episodes = play(policy, Bandit, 2)
    assert policy.encode(policy.decode(odd)) != odd[:-1]
    episodes[0].turns[0].reward = 1.0
    rows, _ = rl.rows_from(episodes, config())
    assert all(row.action_ids == odd for row in rows) and policy.decode(odd).startswith("ab")
    assert all(row.prompt_ids == policy.encode("c") for row in rows)


def test_group_mates_start_alike():
    class Loose(Bandit):
        count = 0

        def reset(self, task):
            Loose.count += 1
            return f"c {Loose.count}"
    with pytest.raises(ValueError, match="two states"):
        play(tiny_policy(), Loose, 2)


def test_cut_is_not_invalid(monkeypatch):
    scripted(monkeypatch, [None, "a", " ", "b"])
    (episode,) = play(tiny_policy(), Corridor, 1)
    assert [(t.cut, t.invalid) for t in episode.turns] == [(True, False), (False, True), (False, True), (False, False)]
    assert [t.action for t in episode.turns] == ["invalid", "a", "invalid", "b"]
    assert [t.reward for t in episode.turns] == pytest.approx([0, 0, 0, 1 / 3])
    assert [t.next_state for t in episode.turns] == ["a", "a", "a", "b"]
    assert episode.truncated and not episode.terminated and episode.final_prompt_ids == tiny_policy().encode("b")
    summary = rollouts.summary([episode])
    assert (summary["cut"], summary["invalid"], summary["turns"], summary["truncated"]) == (0.25, 0.5, 4, 1)
    assert summary["real_transitions"] == 4 and summary["action_tokens"] == 3 + 2 + 1 + 2
    assert rollouts.summary([episode.light()]) == summary


def test_finished_episodes_leave_the_batch(monkeypatch):
    # side by side: one walks straight on, the other stumbles first
    scripted(monkeypatch, ["b", "a", "c", "b", "a", "c", "a"])
    spent = []
    batch = rollouts.RealBatch([Corridor(), Corridor()], spent.append)
    tasks = [Task("t", "task", "train")] * 2
    policy = tiny_policy()
    episodes = rollouts.rollout(policy, batch, tasks, ["g", "g"], Format(policy), lambda state: [], max_turns=9,
                                max_new_tokens=3, max_prompt_tokens=9, temperature=1.0)
    assert [[t.action for t in e.turns] for e in episodes] == [["b", "c", "a"], ["a", "b", "c", "a"]]
    assert [(e.terminated, e.truncated, e.success) for e in episodes] == [(True, False, True)] * 2   # also at the limit
    assert spent == [2, 2, 2, 1] and episodes[0].final_prompt_ids == []


def test_turn_limit_truncates(monkeypatch):
    scripted(monkeypatch, ["b", "c"])
    (episode,) = play(tiny_policy(), Corridor, 1, max_turns=2)
    assert episode.truncated and len(episode.turns) == 2 and episode.final_prompt_ids == tiny_policy().encode("c")


def test_history_is_trimmed_never_the_state():
    class Talkative(Format):
        def prompt(self, task, history, state, admissible):
            return self.policy.encode(" ".join([*history, "b", state]))      # "b" stands for the task
    policy = tiny_policy()
    options = dict(max_turns=4, max_new_tokens=1, temperature=1.0, generator=torch.Generator().manual_seed(0))

    def run(limit):
        return rollouts.rollout(policy, rollouts.RealBatch([Corridor()], lambda n: None), [Task("t", "task", "train")],
                                ["g"], Talkative(policy), lambda state: [], max_prompt_tokens=limit, **options)[0]
    policy.model.lm_head.weight.data[policy.eos_id] = 0
    free, tight, impossible = run(99), run(3), run(1)
    assert free.trimmed == 0 and [len(t.prompt_ids) for t in free.turns] == [2, 3, 4, 5]
    assert tight.trimmed > 0 and not tight.overlong
    assert all(len(t.prompt_ids) <= 3 and t.prompt_ids[-2:] == policy.encode(f"b {t.state}") for t in tight.turns)
    assert impossible.overlong and impossible.truncated and impossible.turns == []


def test_answers_have_fixed_readings():
    tagged = {"<think>x</think><action>click buy</action>": "click buy", "<action>click buy</action>": None,
              "<think>x</think><action>a</action><action>b</action>": None, "<think>x</think>": None, "click buy": None,
              "<think>x</think><action>a</action> and more": None, "<think>x</think><ACTION>a</ACTION>": None,
              "<think>x</think><action> </action>": None}
    assert {text: formats.parse_action(text, tagged=True) for text in tagged} == tagged
    bare = {"click buy": "click buy", " click buy ": "click buy", "": None, "click <act> buy": None}
    assert {text: formats.parse_action(text, tagged=False) for text in bare} == bare


def test_equal_generators_give_equal_rollouts():
    policy = tiny_policy()
    first, second, other = (play(policy, Corridor, 8, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert first == second and first != other
    greedy = play(policy, Corridor, 8, temperature=0)
    assert greedy == play(policy, Corridor, 8, temperature=0) and mean_outcome(greedy) == greedy[0].outcome


def test_global_generators_are_untouched():
    policy, value, generator = tiny_policy(), rl.ValueHead(32, 1e-2), torch.Generator().manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    play(policy, Corridor, 4, generator=generator)
    rl.update(policy, None, sgd(policy), random_rows(policy), config(algorithm="ppo"), value, generator)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_failing_world_surfaces():
    class Broken(Bandit):
        def step(self, action):
            raise RuntimeError("the shop burned down")
    with pytest.raises(RuntimeError, match="burned down"):
        play(tiny_policy(), Broken, 2)
