// Tells a CPU build of PyTorch that there are CUDA devices, so that device guards of Python bindings find one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
thread_local c10::DeviceIndex current = 0;  // of this thread, as CUDA has it
c10::DeviceIndex count = 1;
}  // namespace

extern "C" void pretend_devices(int devices) { count = static_cast<c10::DeviceIndex>(devices); }
extern "C" void pretend_set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
extern "C" int pretend_current_device() { return current; }

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct PretendedGuard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device device) const override {
    const Device before(static_type, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(static_type, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return Stream(Stream::DEFAULT, stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return count; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)

// Autograd's engine asks the hooks for an accelerator.
struct CUDAHooks final : public at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return count; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const auto before = current;
    current = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return count; }
  std::string showConfig() const override { return "  - pretended CUDA\n"; }
  long versionCUDART() const override { return 13000; }
  long versionCuDNN() const override { return 91501; }
  long versionRuntimeCuDNN() const override { return 91501; }
  void deviceSynchronize(DeviceIndex) const override {}
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace
