"""The learner: state, scores, update, imitation.

Modules:

    adam8bit       Adam with moments of 8 bits: two bytes of state per parameter instead of eight
    conversations  Preferences and demonstrations from JSONL files
    critic         Actor and critic: their parameters as one pytree, and scores with values
    diagnostics    Metrics of an update besides those of its algorithm, computed from scores and a batch
    imitation      Supervised warm start from demonstrations
    loss_scale     Loss scaling for gradients in float16, which holds nothing below 6e-8 or above 65,504
    scoring        Scores of trajectories under the reference and the critic, before advantages are computed
    state          The learner's state, carried from update to update, and its optimizer
    update         The update: from a batch to the next learner state, in mini-batches and micro-batches
"""

from flowgrpo.learner.conversations import read_demonstrations, read_preferences
from flowgrpo.learner.critic import copied_trunk, separate_network, shared_trunk
from flowgrpo.learner.diagnostics import DiagnosticsSettings
from flowgrpo.learner.imitation import demonstrate, imitation_rows, make_supervised, packed_imitation
from flowgrpo.learner.loss_scale import with_loss_scale
from flowgrpo.learner.state import LearnerState, adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, check_mini_batches, make_score, make_update
