"""What leases forbid, as the models are now. Used by `broker.models`."""

from __future__ import annotations

from broker.catalogue import Catalogue
from broker.ensemble_members import all_ensembles_of
from broker.leases import Leases
from broker.repository.config import ModelConfig
from shm.errors import Code, InferError


def check_free(catalogue: Catalogue, leases: Leases, model: str) -> None:
    """Raises InferError UNAVAILABLE, with how many keep it, where a model must not be unloaded."""
    if problem := leases.refusal(model, all_ensembles_of(catalogue, model)):
        raise InferError(Code.UNAVAILABLE, f"failed to unload '{model}', {problem}")


def check_versions(catalogue: Catalogue, leases: Leases, config: ModelConfig) -> None:
    """The same where a load of `config` would unload a version that somebody keeps."""
    if config.name not in catalogue.known:
        return
    versions = catalogue.known[config.name].versions
    for number, count in leases.versions(config.name).items():
        if number not in config.versions and number in versions and versions[number].generation:
            raise InferError(
                Code.UNAVAILABLE,
                f"failed to load '{config.name}', version {number} would be unloaded, and {count} "
                f"lease{'s' * (count > 1)} on it (keep_loaded()) {'keep' if count > 1 else 'keeps'} it loaded",
            )
