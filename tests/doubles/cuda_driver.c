/* SPDX-License-Identifier: Apache-2.0 */
/* A double of CUDA's driver for tests of cuDNN on machines without a device: what cuDNN looks up while
   it makes a plan. Code can be loaded, into nothing; all else says that there is no device. */

enum { success = 0, no_device = 100 };
static int code, kernel;

#define WITHOUT_DEVICE(name) \
    int name(void);          \
    int name(void) { return no_device; }

WITHOUT_DEVICE(cuCtxGetCurrent)
WITHOUT_DEVICE(cuCtxGetDevice)
WITHOUT_DEVICE(cuCtxGetLimit)
WITHOUT_DEVICE(cuCtxPopCurrent)
WITHOUT_DEVICE(cuCtxPushCurrent)
WITHOUT_DEVICE(cuDeviceGet)
WITHOUT_DEVICE(cuDeviceGetAttribute)
WITHOUT_DEVICE(cuDeviceGetCount)
WITHOUT_DEVICE(cuDeviceGetName)
WITHOUT_DEVICE(cuFuncGetAttribute)
WITHOUT_DEVICE(cuFuncSetAttribute)
WITHOUT_DEVICE(cuGetProcAddress)
WITHOUT_DEVICE(cuGetProcAddress_v2)
WITHOUT_DEVICE(cuInit)
WITHOUT_DEVICE(cuKernelGetAttribute)
WITHOUT_DEVICE(cuKernelGetFunction)
WITHOUT_DEVICE(cuKernelSetAttribute)
WITHOUT_DEVICE(cuLaunchCooperativeKernel)
WITHOUT_DEVICE(cuLaunchKernel)
WITHOUT_DEVICE(cuLaunchKernelEx)
WITHOUT_DEVICE(cuLibraryLoadFromFile)
WITHOUT_DEVICE(cuLinkAddData)
WITHOUT_DEVICE(cuLinkComplete)
WITHOUT_DEVICE(cuLinkCreate)
WITHOUT_DEVICE(cuLinkDestroy)
WITHOUT_DEVICE(cuModuleGetFunction)
WITHOUT_DEVICE(cuModuleLoadData)
WITHOUT_DEVICE(cuModuleUnload)
WITHOUT_DEVICE(cuOccupancyMaxPotentialClusterSize)
WITHOUT_DEVICE(cuStreamGetCtx)
WITHOUT_DEVICE(cuTensorMapEncodeIm2col)
WITHOUT_DEVICE(cuTensorMapEncodeTiled)

int cuDriverGetVersion(int* version);
int cuDriverGetVersion(int* version) {
    *version = 13000;
    return success;
}
int cuGetErrorString(int error, char const** text);
int cuGetErrorString(int error, char const** text) {
    *text = error == success ? "no error" : "no device";
    return success;
}
int cuGetErrorName(int error, char const** text);
int cuGetErrorName(int error, char const** text) { return cuGetErrorString(error, text); }

int cuLibraryLoadData(void** library);
int cuLibraryLoadData(void** library) {
    *library = &code;
    return success;
}
int cuLibraryGetKernel(void** found);
int cuLibraryGetKernel(void** found) {
    *found = &kernel;
    return success;
}
int cuLibraryUnload(void* library);
int cuLibraryUnload(void* library) {
    (void)library;
    return success;
}
