// The part of ONNX Runtime's C API that custom operators need, because the package on PyPI contains no header.
//
// The API is a table of function pointers that only grows at its end. The offsets below are those of version 17 (ONNX
// Runtime 1.17) and of every later version, so one library works with all of them. tests/test_onnxruntime.py compares
// the offsets with the real header if it is installed (Debian 13: libonnxruntime-dev).
#pragma once

#include <cstddef>
#include <cstdint>

namespace attendless::onnxruntime {

constexpr uint32_t kVersion = 17;

struct Status;  // null: success
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct Domain;
struct SessionOptions;
struct CustomOp;

enum ElementType { kUndefined = 0, kFloat = 1, kInt32 = 6, kInt64 = 7, kBfloat16 = 16 };
enum Characteristic { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum Code { kFail = 1, kInvalidArgument = 2 };

using Unused = void (*)();

struct Api {
  Status* (*CreateStatus)(Code code, const char* text);
  Unused from_1[25];
  Status* (*CreateCustomOpDomain)(const char* name, Domain** out);
  Status* (*CustomOpDomain_Add)(Domain* domain, const CustomOp* op);
  Status* (*AddCustomOpDomain)(SessionOptions* options, Domain* domain);
  Unused from_29[22];
  Status* (*GetTensorMutableData)(Value* value, void** out);
  Unused from_52[8];
  Status* (*GetTensorElementType)(const TensorInfo* info, ElementType* out);
  Status* (*GetDimensionsCount)(const TensorInfo* info, size_t* out);
  Status* (*GetDimensions)(const TensorInfo* info, int64_t* out, size_t count);
  Unused from_63[2];
  Status* (*GetTensorTypeAndShape)(const Value* value, TensorInfo** out);
  Unused from_66[19];
  Status* (*KernelInfoGetAttribute_float)(const KernelInfo* info, const char* name, float* out);
  Status* (*KernelInfoGetAttribute_int64)(const KernelInfo* info, const char* name, int64_t* out);
  Status* (*KernelInfoGetAttribute_string)(const KernelInfo* info, const char* name, char* out, size_t* size);
  Status* (*KernelContext_GetInputCount)(const KernelContext* context, size_t* out);
  Unused from_89[1];
  Status* (*KernelContext_GetInput)(const KernelContext* context, size_t number, const Value** out);
  Status* (*KernelContext_GetOutput)(KernelContext* context, size_t number, const int64_t* shape, size_t rank,
                                     Value** out);
  Unused from_92[1];
  void (*ReleaseStatus)(Status* status);
  Unused from_94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(TensorInfo* info);
  Unused from_100[62];
  Status* (*KernelInfoGetAttributeArray_float)(const KernelInfo* info, const char* name, float* out, size_t* size);
  Status* (*KernelInfoGetAttributeArray_int64)(const KernelInfo* info, const char* name, int64_t* out, size_t* size);
  Unused from_164[66];
  Status* (*KernelInfo_GetInputCount)(const KernelInfo* info, size_t* out);
  Unused from_231[43];
  Status* (*KernelContext_ParallelFor)(const KernelContext* context, void (*body)(void*, size_t), size_t total,
                                       size_t batches, void* given);
};

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);  // null if that version is newer than the runtime
  const char* (*GetVersionString)();
};

// The description of an operator, as a table of callbacks.
struct CustomOp {
  uint32_t version;
  Unused CreateKernel;
  const char* (*GetName)(const CustomOp* op);
  const char* (*GetExecutionProviderType)(const CustomOp* op);
  ElementType (*GetInputType)(const CustomOp* op, size_t number);
  size_t (*GetInputTypeCount)(const CustomOp* op);
  ElementType (*GetOutputType)(const CustomOp* op, size_t number);
  size_t (*GetOutputTypeCount)(const CustomOp* op);
  Unused KernelCompute;
  void (*KernelDestroy)(void* kernel);
  Characteristic (*GetInputCharacteristic)(const CustomOp* op, size_t number);
  Characteristic (*GetOutputCharacteristic)(const CustomOp* op, size_t number);
  int (*GetInputMemoryType)(const CustomOp* op, size_t number);
  int (*GetVariadicInputMinArity)(const CustomOp* op);
  int (*GetVariadicInputHomogeneity)(const CustomOp* op);
  int (*GetVariadicOutputMinArity)(const CustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const CustomOp* op);
  Status* (*CreateKernelV2)(const CustomOp* op, const Api* api, const KernelInfo* info, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext* context);
  Unused InferOutputShapeFn;
  int (*GetStartVersion)(const CustomOp* op);
  int (*GetEndVersion)(const CustomOp* op);
  Unused GetMayInplace, ReleaseMayInplace, GetAliasMap, ReleaseAliasMap;
};

}  // namespace attendless::onnxruntime
