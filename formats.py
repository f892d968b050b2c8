"""The texts that the models read and write: one strict format per role, each with its parser.

Policy:             <task> .. <hist> .. <state> .. <act>                                  ->  action
Experience model:   <ret> key <to> kind .. <task> .. <hist> .. <state> .. <act> .. <think>
                                                                    ->  reasoning <next> next state <go|fail|win>
Task writer:        <vary> task <seed>                                                    ->  task

The closing marker of the experience model carries the two flags of the paper's figure: ``<go>`` not done,
``<fail>`` done without success, ``<win>`` done with success.  So "success but not done" cannot be written.

Text from an environment can never forge a marker: ``escape`` rewrites every ``<``, which also breaks the special
tokens of chat templates (``<|im_end|>``, ``<|eot_id|>``).  Nor can one action pass for two: ``listed`` rewrites a
lone ``;`` in an action, for that is what stands between the actions of a history.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Sequence

CLOSING = {(False, False): "<go>", (True, False): "<fail>", (True, True): "<win>"}
FLAGS = {marker: flags for flags, marker in CLOSING.items()}
MARKERS = ("<do>", "<ret>", "<to>", "<task>", "<hist>", "<state>", "<act>", "<think>", "<next>", "<vary>", "<seed>", *FLAGS)
SEPARATORS = {";": "&semi;", "|": "&vert;"}     # between the actions of a history, between possible actions
DATE = "26 Jul 2024"     # in every prompt of a template that writes one; Llama-3's own default is the day of the prompt

POLICY_SYSTEM = (
    "You are an agent that acts in a text environment. You read the task, your latest actions, the current state and "
    "the actions that are possible now. Think briefly, then choose one action. Answer in exactly this form: "
    "<think>your reasoning</think><action>the action</action>")
MEXP_SYSTEM = (
    "You are an environment. You read similar past transitions (between <ret> and <to>, then their outcome), the task, "
    "the agent's earlier actions, the current state and the action it takes now. Reason about what the action changes "
    "and about which wishes of the task are met, then write <next>, the next state, and one closing marker: <go> if the "
    "episode goes on, <fail> if it ends without success, <win> if it ends with the task fulfilled. An action that is "
    "not possible changes nothing and earns nothing.")
WRITER_SYSTEM = (
    "You write tasks for an agent. You read one task and write a variation of it: the same kind of actions, but other "
    "constraints, goals or context. It must be feasible, clear and different in meaning. Write the task alone.")


def escape(text: str) -> str:
    """Environment text -> text without any marker or special token; ``unescape`` is its inverse."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def unescape(text: str) -> str:
    """Inverse of ``escape``, and of what ``listed`` does to one text."""
    for mark, name in {"<": "&lt;", **SEPARATORS, "&": "&amp;"}.items():
        text = text.replace(name, mark)
    return text


def listed(texts: Sequence[str], mark: str) -> str:
    """Environment texts with `` mark `` between them.  No text can forge one: the word ``mark`` is rewritten in it, and
    so different lists that are not empty read differently."""
    return f" {mark} ".join(" ".join(SEPARATORS[mark] if word == mark else word for word in escape(text).split(" "))
                            for text in texts)


def history_part(history: Sequence[str]) -> str:
    """``history``: earlier actions, oldest first.  No action and one empty action are told apart by a space."""
    return f"<hist> {listed(history, ';')}" if history else "<hist>"


def join(*parts: str) -> str:
    """Parts separated by single spaces, empty ones left out."""
    return " ".join(p for p in parts if p)


def policy_prompt(task: str, history: Sequence[str], state: str, admissible: Sequence[str] = ()) -> str:
    """``history`` are the latest actions, oldest first; ``admissible`` is listed for instruct models only."""
    possible = join("<can>", listed(admissible, "|")) if admissible else ""
    return join("<task>", escape(task), history_part(history), "<state>", escape(state), possible, "<act>")


ACTION = re.compile(r"\s*(?:<think>(?P<think>(?:(?!</?think>|</?action>).)*)</think>)\s*"
                    r"<action>(?P<action>(?:(?!</?action>).)*)</action>\s*", re.DOTALL)


def parse_action(text: str, tagged: bool) -> str | None:
    """The policy's answer -> action, or None if it is malformed.

    ``tagged``: exactly one ``<think>..</think><action>..</action>`` and nothing else; otherwise the bare action.
    """
    if tagged:
        match = ACTION.fullmatch(text)
        return unescape(" ".join(match["action"].split())) or None if match else None
    thought, marker, action = text.rpartition("<do> ")
    return None if any(m in thought or m in action for m in MARKERS) else unescape(action.strip()) or None


@dataclass(frozen=True)
class Answer:
    """What the experience model wrote for one step of Eq. 4, before edits are applied."""
    reasoning: str
    next: str
    done: bool
    success: bool


def mexp_prompt(task: str, history: Sequence[str], state: str, action: str,
                demos: Sequence[tuple[str, str]] = ()) -> str:
    """``demos``: (what was done, what came of it) of the retrieved transitions, nearest first."""
    shown = [join("<ret>", escape(did), "<to>", escape(came)) for did, came in demos]
    return join(*shown, "<task>", escape(task), history_part(history), "<state>", escape(state),
                "<act>", escape(action), "<think>")


def mexp_target(answer: Answer) -> str:
    return join(escape(answer.reasoning), "<next>", escape(answer.next), CLOSING[answer.done, answer.success])


def parse_answer(text: str) -> Answer:
    """Inverse of ``mexp_target``.  Raises ValueError unless the text is exactly one well-formed answer."""
    words = text.split(" ")
    marks = [w for w in words if w in MARKERS]
    if len(marks) != 2 or marks[0] != "<next>" or words[-1] not in FLAGS:
        raise ValueError(f"not an answer of the form 'reasoning <next> state <go|fail|win>': {text[:80]!r}")
    cut = words.index("<next>")
    done, success = FLAGS[words[-1]]
    return Answer(unescape(" ".join(words[:cut])), unescape(" ".join(words[cut + 1:-1])), done, success)


def writer_prompt(seed: str) -> str:
    return join("<vary>", escape(seed), "<seed>")


def parse_task(text: str) -> str | None:
    return None if any(m in text for m in MARKERS) else unescape(text.strip()) or None


class PolicyFormat:
    """How a policy is asked and read (``rollouts.PromptFormat``): tagged answers and a list of the admissible
    actions for instruct models, the bare action for the tiny backbone."""

    def __init__(self, lm, history: int):
        self.lm, self.history, self.tagged = lm, history, lm.chat

    def prompt(self, task: str, history: Sequence[str], state: str, admissible: Sequence[str] = ()) -> list[int]:
        recent = history[-self.history:] if self.history else ()
        return self.lm.prompt(POLICY_SYSTEM, policy_prompt(task, recent, state, admissible if self.tagged else ()))

    def parse(self, text: str) -> str | None:
        return parse_action(text, self.tagged)

    def target(self, action: str, thought: str = "") -> list[int]:
        """Ids of the answer that says ``action``, with EOS."""
        if self.tagged:
            text = f"<think>{escape(thought)}</think><action>{escape(action)}</action>"
        else:
            text = join(escape(thought), "<do>", escape(action)) if thought else escape(action)
        return self.lm.encode(text) + [self.lm.eos_id]
