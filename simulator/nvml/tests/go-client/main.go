// Command go-client lists the GPUs through go-nvml. With the argument "mig" it first creates an
// instance of the smallest profile on each GPU, and destroys the instances at the end.
package main

import (
	"fmt"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func check(what string, result nvml.Return) {
	if result != nvml.SUCCESS {
		fmt.Fprintln(os.Stderr, what+":", nvml.ErrorString(result))
		os.Exit(1)
	}
}

func partition(device nvml.Device) {
	activation, result := device.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	check("set MIG mode", result)
	check("activate MIG mode", activation)
	profile, result := device.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
	check("profile", result)
	placements, result := device.GetGpuInstancePossiblePlacements(&profile)
	check("placements", result)
	instance, result := device.CreateGpuInstanceWithPlacement(&profile, &placements[1])
	check("create GPU instance", result)
	shape, result := instance.GetComputeInstanceProfileInfo(
		nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	check("compute profile", result)
	compute, result := instance.CreateComputeInstance(&shape)
	check("create compute instance", result)
	partition, result := device.GetMigDeviceHandleByIndex(0)
	check("MIG device", result)
	name, result := partition.GetName()
	check("name of the MIG device", result)
	attributes, result := partition.GetAttributes()
	check("attributes", result)
	instances, result := device.GetGpuInstances(&profile)
	check("GPU instances", result)
	info, result := instances[0].GetInfo()
	check("GPU instance", result)
	fmt.Println(name, attributes.MemorySizeMB, info.Id, info.Placement.Start, len(instances))
	check("destroy compute instance", compute.Destroy())
	check("destroy GPU instance", instance.Destroy())
}

func main() {
	check("init", nvml.Init())
	count, result := nvml.DeviceGetCount()
	check("count", result)
	for index := range count {
		device, result := nvml.DeviceGetHandleByIndex(index)
		check("handle", result)
		name, result := device.GetName()
		check("name", result)
		memory, result := device.GetMemoryInfo_v2()
		check("memory", result)
		uuid, result := device.GetUUID()
		check("uuid", result)
		fmt.Println(name, memory.Total>>20, uuid)
		if len(os.Args) > 1 && os.Args[1] == "mig" {
			partition(device)
		}
	}
	check("shutdown", nvml.Shutdown())
}
