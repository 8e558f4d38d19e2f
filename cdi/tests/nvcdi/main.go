// Command nvcdi prints what nvidia-container-toolkit gives to containers of all GPUs of a driver root: one line
// per device node, mount and hook.
//
// Usage: nvcdi DRIVER_ROOT DEV_ROOT
package main

import (
	"fmt"
	"io"
	"log"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/sirupsen/logrus"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: nvcdi DRIVER_ROOT DEV_ROOT")
	}
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	// The libraries of the tree are not loadable. Without NVML the version is that of the file names.
	library := &mock.Interface{
		InitFunc: func() nvml.Return { return nvml.ERROR_LIBRARY_NOT_FOUND },
	}
	cdi, err := nvcdi.New(
		nvcdi.WithLogger(logger),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithDriverRoot(os.Args[1]),
		nvcdi.WithDevRoot(os.Args[2]),
		nvcdi.WithNvmlLib(library),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
		nvcdi.WithNVIDIACDIHookPath("/usr/bin/nvidia-cdi-hook"),
	)
	if err != nil {
		log.Fatal(err)
	}
	edits, err := cdi.GetCommonEdits()
	if err != nil {
		log.Fatal(err)
	}
	for _, node := range edits.DeviceNodes {
		fmt.Println("device", node.Path)
	}
	for _, mount := range edits.Mounts {
		fmt.Println("mount", mount.ContainerPath)
	}
	for _, hook := range edits.Hooks {
		fmt.Println("hook", hook.Args[1])
	}
}
