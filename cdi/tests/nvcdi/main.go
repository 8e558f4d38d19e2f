// Command nvcdi prints what nvidia-container-toolkit gives to containers of the first GPU of a driver root: one line
// per device node, mount and hook.
//
// Usage: nvcdi DRIVER_VERSION DRIVER_ROOT DEV_ROOT
package main

import (
	"fmt"
	"io"
	"log"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/sirupsen/logrus"
	"tags.cncf.io/container-device-interface/specs-go"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: nvcdi DRIVER_VERSION DRIVER_ROOT DEV_ROOT")
	}
	version, driverRoot, devRoot := os.Args[1], os.Args[2], os.Args[3]
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	// The libraries of the tree are not loadable, so NVML is that of a model of a machine.
	library := dgxa100.New()
	library.SystemGetDriverVersionFunc = func() (string, nvml.Return) {
		return version, nvml.SUCCESS
	}
	for _, device := range library.Devices {
		device.(*dgxa100.Device).IsMigDeviceHandleFunc = func() (bool, nvml.Return) {
			return false, nvml.SUCCESS
		}
	}
	cdi, err := nvcdi.New(
		nvcdi.WithLogger(logger),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithDriverRoot(driverRoot),
		nvcdi.WithDevRoot(devRoot),
		nvcdi.WithNvmlLib(library),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
		nvcdi.WithNVIDIACDIHookPath("/usr/bin/nvidia-cdi-hook"),
	)
	if err != nil {
		log.Fatal(err)
	}
	common, err := cdi.GetCommonEdits()
	if err != nil {
		log.Fatal(err)
	}
	devices, err := cdi.GetDeviceSpecsByID("0")
	if err != nil {
		log.Fatal(err)
	}
	show(common.ContainerEdits)
	show(&devices[0].ContainerEdits)
}

func show(edits *specs.ContainerEdits) {
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
