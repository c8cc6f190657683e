"""Judges of outcomes: functions that return a `Reward`.

Modules:

    combine              Rewards made of rewards
    format               Rewards of form: `check_format` of declared pieces and `check_json` give 1 where an output has
    judge                Frozen models as judges
    reasoning_gym        The verifiers of reasoning-gym as a reward
    reasoning_gym_child  Scores of answers to tasks by reasoning-gym's verifiers
    reward_model         A scalar-head reward model as a reward
"""

from flowgrpo.rewards.answers.game24 import game24
from flowgrpo.rewards.answers.match import answer, exact, match_answers, named, numeric, same_text
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.similarity import plain_list, similarity
from flowgrpo.rewards.answers.symbolic import mathematics
from flowgrpo.rewards.code.reward import code
from flowgrpo.rewards.combine import router, score_async, second_check, threaded, with_length
from flowgrpo.rewards.format import check_format, check_json
from flowgrpo.rewards.judge import ask_alone, ask_with_gold, sampled_verdicts, verifier_probability
from flowgrpo.rewards.reasoning_gym import reasoning
from flowgrpo.rewards.reward_model import model_reward
from flowgrpo.rewards.vision.boxes import box_f1, box_iou, caption_score, picture_score, point_in_box
from flowgrpo.rewards.vision.drawing import drawing_reward
