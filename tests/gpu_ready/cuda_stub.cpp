// Makes torch accept fake CUDA tensors without a GPU: autograd, streams, AdamW, FSDP2 and the selection of the SDPA
// kernel need a device guard, CUDA hooks and a dispatch entry. CPU builds register none; those of CUDA builds call the
// driver, so these take precedence. Nothing is computed. Load it before torch is imported, and call replace_cuda
// afterwards; torch.cuda.is_available() stays False.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

using namespace c10;

namespace {

Device here() {
  return Device(DeviceType::CUDA, 0);
}

struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, here()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, here()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, here()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, here()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// The rules of a CUDA build that matter here: flash supports half precision without a mask, and GQA; efficient supports
// float32 and masks, with one key head per query head; math supports everything.
int64_t choose_kernel(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool) {
  const auto& context = at::globalContext();
  const auto dtype = query.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  const bool masked = mask.has_value() && mask->defined();
  const bool same_width = query.sym_size(-1) == value.sym_size(-1);
  const bool same_heads = query.sym_size(1) == key.sym_size(1);
  auto chosen = at::SDPBackend::error;
  if (context.userEnabledFlashSDP() && half && !masked && same_width && query.sym_size(-1) <= 256) {
    chosen = at::SDPBackend::flash_attention;
  } else if (context.userEnabledMemEfficientSDP() && same_heads && (half || dtype == at::kFloat)) {
    chosen = at::SDPBackend::efficient_attention;
  } else if (context.userEnabledMathSDP()) {
    chosen = at::SDPBackend::math;
  }
  return static_cast<int64_t>(chosen);
}

// A CPU build composes this operator of others, unless a CUDA kernel is registered. Fake tensors never call it.
std::tuple<at::Tensor, at::Tensor> fused_rms_norm(
    const at::Tensor& input,
    at::IntArrayRef,
    const std::optional<at::Tensor>&,
    std::optional<double>) {
  return {input, input};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_fused_rms_norm", fused_rms_norm);
}

} // namespace

namespace at {

// The registry requires the name at::CUDAHooks.
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, REGISTRY_PREFERRED, CUDAHooks)

} // namespace at

// Importing a CUDA build of torch registers its own guard and selection of kernels, and the last ones count.
extern "C" void replace_cuda() {
  static Guard guard;
  impl::DeviceGuardImplRegistrar(DeviceType::CUDA, &guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_kernel);
}
