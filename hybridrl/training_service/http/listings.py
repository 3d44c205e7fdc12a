"""Listings of models, sessions and stored weights, in the forms of the API.

`routes` calls it. Nothing here changes anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import DataError
from hybridrl.training_service.service import TrainingService
from hybridrl.training_service.state.records import TrainedModel
from hybridrl.training_service.state.store import described, iso
from hybridrl.training_service.state.tenants import Tenant

MAX_PAGE = 1000
CLIENT_CONFIG = {  # what the SDK is to do; the other flags have its defaults
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": False, "sample_cancel_max_batch_size": 64}


def page(items: Sequence[Any], query: Mapping[str, str], *, name: str, default: int = 20) -> dict[str, Any]:
    """Return the items that a query's `limit` and `offset` choose, under `name`, with the cursor."""
    try:
        limit, offset = int(query.get("limit", default)), int(query.get("offset", 0))
    except ValueError as error:
        raise DataError("limit and offset must be whole numbers") from error
    if not 0 <= limit <= MAX_PAGE or offset < 0:
        raise DataError(f"limit={limit} and offset={offset}: at most {MAX_PAGE} from 0 on")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: list(items[offset : offset + limit]), "cursor": cursor}


def capabilities(service: TrainingService) -> dict[str, Any]:
    """Return the models that can be trained: one."""
    settings = service.settings
    model = {
        "model_name": settings.base_model,
        "max_context_length": settings.max_length,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


def info(service: TrainingService, tenant: Tenant, model_id: Any) -> dict[str, Any]:
    """Return what a client asks about a model when it makes a client object."""
    model, name = service.table.model(tenant, model_id), service.settings.base_model
    rank = model.adapter.rank if model.adapter else 0
    return {
        "type": "get_info",
        "model_data": {"arch": None, "model_name": name, "tokenizer_id": service.settings.path},
        "model_id": model.id,
        "optimizer_config": {"type": "adamw"},
        "is_lora": rank > 0,
        "lora_rank": rank,
        "model_name": name,
    }


def run(service: TrainingService, tenant: Tenant, model: TrainedModel) -> dict[str, Any]:
    """Return a model as a `TrainingRun`."""
    stored = checkpoints(service, tenant, model.id)
    rank = model.adapter.rank if model.adapter else None
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": tenant.name,
        "is_lora": rank != 0,
        "corrupted": model.broken is not None,
        "lora_rank": rank,
        "last_request_time": iso(model.last_request),
        "last_checkpoint": next((one for one in stored if one["checkpoint_type"] == "training"), None),
        "last_sampler_checkpoint": next((one for one in stored if one["checkpoint_type"] == "sampler"), None),
        "user_metadata": model.metadata,
    }


def models(service: TrainingService, tenant: Tenant) -> list[TrainedModel]:
    """Return a tenant's models, newest session first."""
    return [model for session in service.table.of(tenant) for model in session.models.values()]


def checkpoints(service: TrainingService, tenant: Tenant, model_id: str | None = None) -> list[dict[str, Any]]:
    """Return a tenant's stored weights, newest first."""
    found = service.store.listed(owner=tenant.name, model_id=model_id)
    return [described(*one) for one in found]


def weights_info(service: TrainingService, tenant: Tenant, path: Any) -> dict[str, Any]:
    """Return what stored weights are of."""
    _, entry = service.store.find(path, owner=tenant.name)
    answer = {
        "base_model": entry.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": entry.rank > 0,
        "lora_rank": entry.rank or None,
    }
    return answer | entry.train


def sampler(service: TrainingService, tenant: Tenant, sampler_id: str) -> dict[str, Any]:
    """Return a sampling session."""
    found = service.table.sampler(tenant, sampler_id)
    return {"sampler_id": found.id, "base_model": found.base_model, "model_path": found.model_path}


def session(service: TrainingService, tenant: Tenant, session_id: str) -> dict[str, Any]:
    """Return what belongs to a session."""
    found = service.table.find(tenant, session_id)
    return {
        "training_run_ids": [model.id for model in found.models.values()],
        "sampler_ids": [one.id for one in found.samplers.values()],
        "user_metadata": found.metadata,
        "display_name": found.name,
    }
