"""The names and argument orders that users of verl rely on."""

import inspect

import pytest

from hybridrl import protocol
from hybridrl.single_controller import dispatch, ray_worker_group, worker
from hybridrl.single_controller.placement import pool_views, resource_pool
from hybridrl.trainer.roles import ResourcePoolManager, Role

NAMES = {
    protocol: [
        "DataProto",
        "DataProtoConfig",
        "DataProtoFuture",
        "DataProtoItem",
        "all_gather_data_proto",
        "collate_fn",
        "deserialize_single_tensor",
        "deserialize_tensordict",
        "fold_batch_dim",
        "list_of_dict_to_dict_of_list",
        "pad_dataproto_to_divisor",
        "serialize_single_tensor",
        "serialize_tensordict",
        "unfold_batch_dim",
        "union_numpy_dict",
        "union_tensor_dict",
        "union_two_dict",
        "unpad_dataproto",
    ],
    protocol.DataProto: [
        "check_consistency",
        "chunk",
        "concat",
        "from_dict",
        "from_single_dict",
        "from_tensordict",
        "get_data_info",
        "is_padding_enabled",
        "load_from_disk",
        "make_iterator",
        "padding",
        "pop",
        "print_size",
        "rename",
        "reorder",
        "repeat",
        "sample_level_repeat",
        "save_to_disk",
        "select",
        "select_idxs",
        "slice",
        "split",
        "to",
        "to_tensordict",
        "unfold_column_chunks",
        "union",
    ],
    protocol.DataProtoFuture: ["chunk", "concat", "get"],
    dispatch: [
        "Dispatch",
        "Execute",
        "MAGIC_ATTR",
        "get_predefined_dispatch_fn",
        "make_nd_compute_dataproto_dispatch_fn",
        "register",
        "register_dispatch_mode",
        "update_dispatch_mode",
    ],
    dispatch.Dispatch: [
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    ],
    dispatch.Execute: ["ALL", "RANK_ZERO"],
    worker.Worker: [
        "_register_dispatch_collect_info",
        "execute_func_rank_zero",
        "execute_with_func_generator",
        "get_cuda_visible_devices",
        "get_dispatch_collect",
        "get_master_addr_port",
        "rank",
        "set_dispatch_collect",
        "world_size",
    ],
    resource_pool: ["RayResourcePool", "ResourcePool"],
    resource_pool.RayResourcePool: [
        "add_node",
        "get_placement_groups",
        "local_rank_list",
        "local_world_size_list",
        "world_size",
    ],
    pool_views: ["SubRayResourcePool", "extract_pg_from_exist", "merge_resource_pool", "split_resource_pool"],
    ray_worker_group: [
        "RayClassWithInitArgs",
        "RayWorkerGroup",
        "create_colocated_worker_cls",
        "create_colocated_worker_cls_fused",
        "create_colocated_worker_raw_cls",
    ],
    ray_worker_group.RayClassWithInitArgs: ["set_additional_resource", "update_options"],
    ray_worker_group.RayWorkerGroup: [
        "execute_all",
        "execute_all_async",
        "execute_all_sync",
        "execute_rank_zero",
        "execute_rank_zero_async",
        "execute_rank_zero_sync",
        "from_detached",
        "fuse",
        "master_address",
        "master_port",
        "spawn",
        "start_worker_aliveness_check",
        "worker_names",
        "workers",
    ],
    ResourcePoolManager: ["create_resource_pool", "get_n_gpus", "get_resource_pool"],
}


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in NAMES.items() for name in names])
def test_a_public_name_of_verl_exists(owner, name):
    assert hasattr(owner, name)


def test_roles_are_named_as_in_verl():
    names = {
        "Actor": "actor",
        "Rollout": "rollout",
        "ActorRollout": "actor_rollout",
        "Critic": "critic",
        "RefPolicy": "ref",
        "RewardModel": "rm",
        "ActorRolloutRef": "actor_rollout_ref",
        "Env": "env",
        "TeacherModel": "teacher",
    }
    assert {name: str(Role[name]) for name in names} == names
    assert {f"{Role[name]}": Role[name] for name in names} == {role: role for role in names.values()}
    assert type(str(Role.Actor)) is str, "other processes get plain names, and do not import Role"


@pytest.mark.parametrize(
    ("function", "first_parameters"),
    [
        (dispatch.register, ["dispatch_mode", "execute_mode", "blocking", "materialize_futures"]),
        (protocol.DataProto.from_dict, ["tensors", "non_tensors", "meta_info", "num_batch_dims", "auto_padding"]),
        (protocol.DataProto.select, ["self", "batch_keys", "non_tensor_batch_keys", "meta_info_keys", "deepcopy"]),
        (protocol.DataProto.make_iterator, ["self", "mini_batch_size", "epochs", "seed", "dataloader_kwargs"]),
        (
            resource_pool.RayResourcePool.__init__,
            ["self", "process_on_nodes", "use_gpu", "name_prefix", "max_colocate_count"],
        ),
        (ResourcePoolManager.__init__, ["self", "resource_pool_spec", "mapping", "max_colocate_count"]),
        (ray_worker_group.RayWorkerGroup.__init__, ["self", "resource_pool", "ray_cls_with_init"]),
    ],
)
def test_arguments_are_in_the_order_of_verl(function, first_parameters):
    assert list(inspect.signature(function).parameters)[: len(first_parameters)] == first_parameters
