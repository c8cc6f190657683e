"""Rewards: functions that return a `Reward`, which judges the output of a trajectory.

Modules:

    combine              Rewards composed of rewards: `router`, `combine`, `with_length`, `second_check`
    format               Format rewards: `check_format` and `check_json`
    judge                Frozen models as judges
    reasoning_gym        The verifiers of reasoning-gym as a reward
    reasoning_gym_child  reasoning-gym's verifiers, in a process that can be killed
    reward_model         A scalar-head reward model as a reward
"""

from flowgrpo.rewards.answers.game24 import game24
from flowgrpo.rewards.answers.match import answer, exact, match_answers, numeric, same_text, split_name
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.similarity import plain_list, similarity
from flowgrpo.rewards.answers.symbolic import mathematics
from flowgrpo.rewards.code.reward import code
from flowgrpo.rewards.combine import router, score_async, second_check, threaded, with_length
from flowgrpo.rewards.format import check_format, check_json
from flowgrpo.rewards.judge import (
    VerdictSampling,
    ask_with_gold,
    ask_without_gold,
    sampled_verdicts,
    verifier_probability,
)
from flowgrpo.rewards.reasoning_gym import reasoning
from flowgrpo.rewards.reward_model import model_reward
from flowgrpo.rewards.vision.boxes import box_f1, box_iou, caption_score, picture_score, point_in_box
from flowgrpo.rewards.vision.drawing import drawing_reward
