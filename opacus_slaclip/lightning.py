"""A PyTorch Lightning callback for the threshold; only this module needs ``lightning``."""

from __future__ import annotations

from typing import Any

from opacus_slaclip._records import scalars
from opacus_slaclip.optimizers import SlackReleaseMixin
from opacus_slaclip.recorder import ThresholdRecorder

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "opacus_slaclip.lightning needs PyTorch Lightning: "
        'pip install "opacus-slaclip[lightning]". Without it, use ThresholdRecorder.'
    ) from error


class ThresholdCallback(Callback):
    """Records every release, logs it live and keeps the records through Lightning's checkpoints.

    After each release the module logs, under ``prefix``, the threshold that was used
    (``clip_norm``) and the estimated mean of the clipped norms (``mean_clipped_norm``), both in
    gradient-norm units, and the indicator's first and last slot (``indicator_first``,
    ``indicator_last``), as fractions. A physical batch that releases nothing logs nothing, and
    Lightning repeats the last values. All of it is released, so at no privacy cost.

    Args:
        recorder: What keeps the records, also when it has some already; None for a new one. It is
            attached to the module's private optimizer when training starts, and detached when it
            ends.
        prefix: In front of every logged name.
    """

    def __init__(
        self, recorder: ThresholdRecorder | None = None, *, prefix: str = "slaclip/"
    ) -> None:
        super().__init__()
        self.recorder = ThresholdRecorder() if recorder is None else recorder
        self._prefix = prefix
        self._num_logged = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the recorder to the private optimizer.

        Raises:
            ValueError: If ``configure_optimizers`` did not return exactly one of SlaClip's.
        """
        private = [o for o in trainer.optimizers if isinstance(o, SlackReleaseMixin)]
        if len(private) != 1:
            raise ValueError(
                f"configure_optimizers must return one optimizer of SlaClip's, got {len(private)} "
                f"among {[type(o).__name__ for o in trainer.optimizers]}. Return what "
                "make_private(..., clipping='slaclip') gave, or use a ThresholdRecorder for each."
            )
        self.recorder.attach(private[0])
        self._num_logged = private[0].num_releases

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the release of this batch, if there was one."""
        record = self.recorder.last
        if record is None or record["step"] == self._num_logged:
            return
        self._num_logged = record["step"]
        named = {self._prefix + name: value for name, value in scalars(record).items()}
        # Given a batch size, Lightning does not look for the realized one, which is private.
        pl_module.log_dict(named, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach the recorder; its records stay."""
        self.recorder.detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Detach the recorder after an error as well."""
        self.recorder.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the recorder's state for the checkpoint."""
        return self.recorder.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the records of the checkpoint."""
        self.recorder.load_state_dict(state_dict)
