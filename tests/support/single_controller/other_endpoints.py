"""An endpoint that `endpoint_module` imports."""

from hybridrl.single_controller.invocation import register


@register()
def imported() -> None: ...
