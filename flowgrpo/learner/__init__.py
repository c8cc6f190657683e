"""The learner: state, scores, update, imitation.

Modules:

    adam8bit       Adam with moments of 8 bits, which remembers two bytes per parameter and not eight
    conversations  Preferences and demonstrations that people wrote
    critic         Actor and critic: parameters side by side, and scores with values
    diagnostics    Figures about an update beside its algorithm's metrics, computed from scores and a batch
    imitation      Supervised warm start from demonstrations
    loss_scale     Loss scaling for gradients in float16, which holds nothing below 6e-8 or above 65,504
    scoring        Score trajectories under the reference and the critic, before advantages are computed
    state          The state that a learner carries from update to update, and the optimizer that moves it
    update         Update a learner's state on a batch, in mini-batches and micro-batches
"""

from flowgrpo.learner.conversations import read_demonstrations, read_preferences
from flowgrpo.learner.critic import copied_trunk, own_network, shared_trunk
from flowgrpo.learner.diagnostics import DiagnosticsSettings
from flowgrpo.learner.imitation import demonstrate, imitation_rows, make_supervised, packed_imitation
from flowgrpo.learner.loss_scale import with_loss_scale
from flowgrpo.learner.state import LearnerState, init_learner, make_optimizer
from flowgrpo.learner.update import check_mini_batches, make_score, make_update
