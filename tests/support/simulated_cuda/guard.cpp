// A guard of CUDA devices for a machine without a driver: one device, one stream, events that have always happened.
// `use_simulated_guard` installs it, and lets autograd find no CUDA context that it would have to enter.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr uintptr_t PAGE = 4096;

struct SimulatedGuard : public c10::impl::NoOpDeviceGuardImpl<CUDA> {
  static c10::Device device() { return c10::Device(CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }

  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

bool has_no_context(const void*, c10::DeviceIndex) { return false; }

}  // namespace

extern "C" void use_simulated_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(new SimulatedGuard());
  // torch offers no way to replace its hooks, so their table of virtual functions gets another entry.
  union {
    bool (at::CUDAHooksInterface::*member)(c10::DeviceIndex) const;
    uintptr_t place;  // in the table, in bytes, plus 1
  } function;
  function.member = &at::CUDAHooksInterface::hasPrimaryContext;
  char* table = *reinterpret_cast<char**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()));
  char* entry = table + function.place - 1;
  mprotect(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(entry) & ~(PAGE - 1)), 2 * PAGE, PROT_READ | PROT_WRITE);
  *reinterpret_cast<void**>(entry) = reinterpret_cast<void*>(&has_no_context);
}
